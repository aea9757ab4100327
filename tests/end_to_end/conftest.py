"""Runs that several tests look at."""

from __future__ import annotations

import pytest

from tests.end_to_end.story import Story, tell


@pytest.fixture(scope="session")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return tell(tmp_path_factory.mktemp("story"))
