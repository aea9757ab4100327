"""Objects: large values that stay where they were put, while a small handle to them travels in messages."""

from bus.objects.handle import Object, ObjectError, ObjectGone, ObjectStoreFull
from bus.objects.store import ObjectStore

__all__ = ["Object", "ObjectError", "ObjectGone", "ObjectStore", "ObjectStoreFull"]
