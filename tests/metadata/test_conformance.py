"""What every store does: the embedded one, one ZooKeeper (with ACLs too), an ensemble of three, four ensembles."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from coordinator.metadata.protocol import (
    Create,
    Delete,
    Entry,
    EntryExists,
    HasChildren,
    MetadataStore,
    NoEntry,
    Operation,
    Refused,
    StoreError,
    VersionMismatch,
    Write,
)
from tests.metadata.backends import Backend, take


def test_where_nothing_is_get_says_none_and_children_says_none_are_there(backend: Backend) -> None:
    async def scenario(store: MetadataStore) -> None:
        assert await store.get(f"{backend.job}/nobody") is None
        assert await store.children(f"{backend.job}/nobody") == []

    backend.run(scenario)


@pytest.mark.parametrize("value", [b"", b"binary \x00\xff", b"x" * 65536])
def test_a_created_entry_reads_back_at_version_0(backend: Backend, value: bytes) -> None:
    async def scenario(store: MetadataStore) -> None:
        path = f"{backend.job}/nodes/proxy-0/größe"
        assert await store.create(path, value) == path
        assert await store.get(path) == Entry(path, value, 0)

    backend.run(scenario)


def test_missing_parents_are_made_as_empty_entries(backend: Backend) -> None:
    async def scenario(store: MetadataStore) -> None:
        await store.create(f"{backend.job}/nodes/n1/a/b", b"x")
        for parent in (backend.job, f"{backend.job}/nodes", f"{backend.job}/nodes/n1", f"{backend.job}/nodes/n1/a"):
            assert await store.get(parent) == Entry(parent, b"", 0)

    backend.run(scenario)


def test_creating_what_is_there_is_refused_and_leaves_it(backend: Backend) -> None:
    async def scenario(store: MetadataStore) -> None:
        await store.create(f"{backend.job}/a", b"first")
        with pytest.raises(EntryExists, match=f"{backend.job}/a"):
            await store.create(f"{backend.job}/a", b"second")
        with pytest.raises(EntryExists):
            await store.create(backend.job, b"made as a parent")
        assert await store.get(f"{backend.job}/a") == Entry(f"{backend.job}/a", b"first", 0)

    backend.run(scenario)


def test_versions_count_the_writes_since_creation(backend: Backend) -> None:
    async def scenario(store: MetadataStore) -> None:
        path = f"{backend.job}/a"
        await store.create(path, b"0")
        assert await store.write(path, b"1") == 1
        assert await store.write(path, b"2", expected=1) == 2
        assert await store.get(path) == Entry(path, b"2", 2)
        await store.delete(path)
        await store.create(path, b"again")
        assert await store.get(path) == Entry(path, b"again", 0)

    backend.run(scenario)


def test_a_write_that_expects_another_version_changes_nothing(backend: Backend) -> None:
    async def scenario(store: MetadataStore) -> None:
        path = f"{backend.job}/a"
        await store.create(path, b"0")
        await store.write(path, b"1")
        for expected in (0, 2):
            with pytest.raises(VersionMismatch, match=f"{path}: expected version {expected}"):
                await store.write(path, b"x", expected=expected)
        assert await store.get(path) == Entry(path, b"1", 1)

    backend.run(scenario)


def test_nothing_can_be_written_or_deleted_where_nothing_is(backend: Backend) -> None:
    async def scenario(store: MetadataStore) -> None:
        for expected in (None, 0):
            with pytest.raises(NoEntry, match=f"{backend.job}/a"):
                await store.write(f"{backend.job}/a", b"", expected=expected)
            with pytest.raises(NoEntry, match=f"{backend.job}/a"):
                await store.delete(f"{backend.job}/a", expected=expected)

    backend.run(scenario)


def test_delete_removes_an_entry_of_the_expected_version_only(backend: Backend) -> None:
    async def scenario(store: MetadataStore) -> None:
        path = f"{backend.job}/a"
        await store.create(path, b"0")
        await store.write(path, b"1")
        with pytest.raises(VersionMismatch):
            await store.delete(path, expected=0)
        assert await store.get(path) is not None
        await store.delete(path, expected=1)
        assert await store.get(path) is None

    backend.run(scenario)


@pytest.mark.parametrize("parent", ["", "/a", "/nodes", "/nodes/n1"])
def test_an_entry_with_children_stays(backend: Backend, parent: str) -> None:
    async def scenario(store: MetadataStore) -> None:
        path = backend.job + parent
        await store.create(f"{backend.job}/nodes/n1/x", b"")
        await store.create(f"{backend.job}/nodes/n2", b"")
        await store.create(f"{backend.job}/a/x", b"")
        with pytest.raises(HasChildren, match=path):
            await store.delete(path)
        assert await store.get(path) == Entry(path, b"", 0)

    backend.run(scenario)


def test_a_tree_can_be_taken_down_from_its_leaves_and_leaves_no_name_behind(backend: Backend) -> None:
    async def scenario(store: MetadataStore) -> None:
        nodes = [f"{backend.job}/nodes/n{number}" for number in range(8)]
        for node in nodes:
            await store.create(f"{node}/x", b"")
        for node in nodes:
            await store.delete(f"{node}/x")
            await store.delete(node)
        assert await store.children(f"{backend.job}/nodes") == []
        await store.delete(f"{backend.job}/nodes")
        await store.delete(backend.job)
        assert await store.get(backend.job) is None
        assert backend.job.removeprefix("/jobs/") not in await store.children("/jobs")

    backend.run(scenario)


def test_children_are_the_sorted_names_directly_below(backend: Backend) -> None:
    async def scenario(store: MetadataStore) -> None:
        for number in (3, 11, 0, 7, 5, 2):
            await store.create(f"{backend.job}/nodes/n{number}/deep/deeper", b"")
        await store.create(f"{backend.job}/b", b"")
        assert await store.children(f"{backend.job}/nodes") == ["n0", "n11", "n2", "n3", "n5", "n7"]
        assert await store.children(backend.job) == ["b", "nodes"]
        assert await store.children(f"{backend.job}/nodes/n3") == ["deep"]
        assert backend.job.removeprefix("/jobs/") in await store.children("/jobs")
        assert "jobs" in await store.children("/")

    backend.run(scenario)


def test_sequential_entries_get_distinct_rising_ten_digit_numbers(backend: Backend) -> None:
    async def scenario(store: MetadataStore) -> None:
        stem = f"{backend.job}/queue/item-"
        first = [await store.create(stem, b"", sequential=True) for _ in range(3)]
        together = await asyncio.gather(*(store.create(stem, b"", sequential=True) for _ in range(10)))
        await store.delete(sorted(together)[-1])
        last = await store.create(stem, b"last", sequential=True)
        numbers = [path.removeprefix(stem) for path in [*first, *sorted(together), last]]
        assert all(len(number) == 10 and number.isdigit() for number in numbers)
        assert numbers == sorted(set(numbers))
        assert await store.get(last) == Entry(last, b"last", 0)

    backend.run(scenario)


def test_ephemeral_entries_go_when_their_client_closes_and_others_stay(backend: Backend) -> None:
    async def first(store: MetadataStore) -> None:
        await store.create("/members/" + backend.job[6:], b"", ephemeral=True)
        await store.create(f"{backend.job}/nodes/n1/alive", b"", ephemeral=True)
        await store.create(f"{backend.job}/nodes/n2/alive", b"", ephemeral=True)
        await store.create(f"{backend.job}/vote-", b"", ephemeral=True, sequential=True)
        await store.multi([Create(f"{backend.job}/leader", b"", ephemeral=True)])
        await store.create(f"{backend.job}/kept", b"")
        assert await store.get("/members/" + backend.job[6:]) is not None
        assert await store.children(f"{backend.job}/nodes/n1") == ["alive"]

    async def second(store: MetadataStore) -> None:
        assert await store.get("/members/" + backend.job[6:]) is None
        assert await store.children(f"{backend.job}/nodes/n1") == []
        assert await store.children(f"{backend.job}/nodes/n2") == []
        assert await store.children(backend.job) == ["kept", "nodes"]

    backend.run(first)
    backend.run(second)


def test_an_ephemeral_entry_has_no_children(backend: Backend) -> None:
    async def scenario(store: MetadataStore) -> None:
        await store.create(f"{backend.job}/brief", b"", ephemeral=True)
        with pytest.raises(Refused, match="ephemeral"):
            await store.create(f"{backend.job}/brief/child", b"")
        with pytest.raises(Refused, match="ephemeral"):
            await store.multi([Create(f"{backend.job}/brief/child", b"")])
        assert await store.children(f"{backend.job}/brief") == []

    backend.run(scenario)


def test_a_value_over_64_kib_is_refused_and_nothing_changes(backend: Backend) -> None:
    async def scenario(store: MetadataStore) -> None:
        path, too_much = f"{backend.job}/a", b"x" * 65537
        with pytest.raises(Refused, match=r"65537 bytes.*65536"):
            await store.create(path, too_much)
        assert await store.get(path) is None
        await store.create(path, b"small")
        with pytest.raises(Refused, match=path):
            await store.write(path, too_much)
        with pytest.raises(Refused, match=path):
            await store.multi([Write(path, too_much)])
        assert await store.get(path) == Entry(path, b"small", 0)

    backend.run(scenario)


def test_a_multi_of_more_than_one_request_can_carry_is_refused(backend: Backend) -> None:
    async def scenario(store: MetadataStore) -> None:
        most: list[Operation] = [Create(f"{backend.job}/e{number}", b"x" * 65536) for number in range(8)]
        with pytest.raises(Refused, match="multi"):
            await store.multi([*most, Create(f"{backend.job}/e8", b"x")])
        assert await store.children(backend.job) == []
        await store.multi(most)
        assert len(await store.children(backend.job)) == 8

    backend.run(scenario)


@pytest.mark.parametrize(
    "path", ["", "jobs", "//jobs", "/jobs/", "/jobs//a", "/jobs/../a", "/jobs/.", "/jobs/a\nb", "/jobs/\x00", "/\ue000"]
)
def test_a_malformed_path_is_refused_by_every_method(backend: Backend, path: str) -> None:
    async def scenario(store: MetadataStore) -> None:
        for call in (
            store.get(path),
            store.children(path),
            store.create(path, b""),
            store.write(path, b""),
            store.delete(path),
            store.multi([Delete(path)]),
        ):
            with pytest.raises(Refused):
                await call
        with pytest.raises(Refused):
            store.watch(path)

    backend.run(scenario)


def test_the_root_cannot_be_changed_and_versions_start_at_0(backend: Backend) -> None:
    async def scenario(store: MetadataStore) -> None:
        await store.create(f"{backend.job}/a", b"")
        for call in (
            store.create("/", b""),
            store.write("/", b""),
            store.delete("/"),
            store.write(f"{backend.job}/a", b"", expected=-1),
            store.delete(f"{backend.job}/a", expected=-1),
            store.multi([Write(f"{backend.job}/a", b"", expected=-1)]),
        ):
            with pytest.raises(Refused):
                await call
        assert await store.get(f"{backend.job}/a") == Entry(f"{backend.job}/a", b"", 0)

    backend.run(scenario)


def test_of_two_tasks_that_write_the_same_version_one_wins(backend: Backend) -> None:
    async def scenario(store: MetadataStore) -> None:
        path = f"{backend.job}/epoch"
        await store.create(path, b"")
        for version in range(10):
            results = await asyncio.gather(
                store.write(path, b"left", expected=version),
                store.write(path, b"right", expected=version),
                return_exceptions=True,
            )
            assert [type(result) for result in results if not isinstance(result, int)] == [VersionMismatch]
            assert [result for result in results if isinstance(result, int)] == [version + 1]
            entry = await store.get(path)
            assert entry == Entry(path, b"left" if isinstance(results[0], int) else b"right", version + 1)

    backend.run(scenario)


def test_tasks_that_count_by_compare_and_set_lose_no_count(backend: Backend) -> None:
    async def scenario(store: MetadataStore) -> None:
        path = f"{backend.job}/counter"
        await store.create(path, b"0")

        async def add(times: int) -> None:
            while times:
                entry = await store.get(path)
                assert entry is not None
                try:
                    await store.write(path, str(int(entry.value) + 1).encode(), expected=entry.version)
                    times -= 1
                except VersionMismatch:
                    await asyncio.sleep(0)

        await asyncio.gather(add(15), add(15))
        assert await store.get(path) == Entry(path, b"30", 30)

    backend.run(scenario)


def test_multi_does_all_in_order_and_makes_parents(backend: Backend) -> None:
    async def scenario(store: MetadataStore) -> None:
        node = f"{backend.job}/nodes/n1"
        await store.create(f"{node}/old", b"")
        await store.multi(
            [
                Create(f"{node}/deep/er/new", b"1"),
                Write(f"{node}/deep/er/new", b"2", expected=0),
                Delete(f"{node}/old", expected=0),
                Create(f"{node}/old", b"anew"),
            ]
        )
        assert await store.get(f"{node}/deep/er/new") == Entry(f"{node}/deep/er/new", b"2", 1)
        assert await store.get(f"{node}/old") == Entry(f"{node}/old", b"anew", 0)

    backend.run(scenario)


@pytest.mark.parametrize(
    ("name", "error"),
    [("exists", EntryExists), ("missing", NoEntry), ("stale", VersionMismatch), ("parent", HasChildren)],
)
def test_multi_does_nothing_where_one_operation_fails_and_says_which(
    backend: Backend, name: str, error: type[StoreError]
) -> None:
    async def scenario(store: MetadataStore) -> None:
        node = f"{backend.job}/nodes/n1"
        await store.create(f"{node}/a", b"0")
        await store.create(f"{node}/full/child", b"")
        failing: dict[str, Operation] = {
            "exists": Create(f"{node}/a", b""),
            "missing": Write(f"{node}/nobody", b""),
            "stale": Delete(f"{node}/a", expected=7),
            "parent": Delete(f"{node}/full"),
        }
        operation = failing[name]
        with pytest.raises(error, match=operation.path):
            await store.multi([Write(f"{node}/a", b"1"), Create(f"{node}/x/y", b""), operation, Delete(f"{node}/a")])
        assert await store.get(f"{node}/a") == Entry(f"{node}/a", b"0", 0)
        assert await store.children(node) == ["a", "full"]

    backend.run(scenario)


def test_an_empty_multi_does_nothing(backend: Backend) -> None:
    async def scenario(store: MetadataStore) -> None:
        await store.multi([])
        assert await store.children(backend.job) == []

    backend.run(scenario)


def test_a_watch_reports_creation_writing_and_deletion(backend: Backend) -> None:
    async def scenario(store: MetadataStore) -> None:
        path = f"{backend.job}/a"
        async with aclosing(store.watch(backend.job)) as watch:
            await store.create(path, b"")
            assert await take(watch, 1) == [("created", path)]
            await store.write(path, b"1")
            assert await take(watch, 1) == [("written", path)]
            await store.delete(path)
            assert await take(watch, 1) == [("deleted", path)]
            await store.multi([Create(path, b""), Create(f"{backend.job}/b", b"")])
            assert sorted(await take(watch, 2)) == [("created", path), ("created", f"{backend.job}/b")]

    backend.run(scenario)


def test_a_watch_begins_now_and_sees_only_what_is_directly_below(backend: Backend) -> None:
    async def scenario(store: MetadataStore) -> None:
        await store.create(f"{backend.job}/before", b"")
        await store.create(f"{backend.job}/written", b"")
        watch = store.watch(backend.job)
        await store.write(f"{backend.job}/written", b"1")
        await store.create(f"{backend.job}/before/below", b"")
        await store.write(f"{backend.job}/before/below", b"1")
        await store.create(f"{backend.job}/parent/child", b"")
        await store.create(f"{backend.job}beside", b"")
        await store.create(f"{backend.job}/last", b"")
        assert await take(watch, 3) == [
            ("written", f"{backend.job}/written"),
            ("created", f"{backend.job}/parent"),
            ("created", f"{backend.job}/last"),
        ]

    backend.run(scenario)


def test_a_watch_outlives_its_prefix(backend: Backend) -> None:
    async def scenario(store: MetadataStore) -> None:
        prefix = f"{backend.job}/later"
        watch = store.watch(prefix)
        for _ in range(2):
            await store.create(f"{prefix}/a", b"")
            assert await take(watch, 1) == [("created", f"{prefix}/a")]
            await store.delete(f"{prefix}/a")
            await store.delete(prefix)
            assert await take(watch, 1) == [("deleted", f"{prefix}/a")]

    backend.run(scenario)


def test_a_watch_of_the_nodes_sees_all_of_them(backend: Backend) -> None:
    async def scenario(store: MetadataStore) -> None:
        nodes = [f"{backend.job}/nodes/n{number}" for number in range(8)]
        jobs, watch = store.watch("/jobs"), store.watch(f"{backend.job}/nodes")
        for node in nodes:
            await store.create(f"{node}/x", b"")
        assert sorted(await take(watch, 8)) == [("created", node) for node in nodes]
        await store.create(f"{backend.job}-next", b"")
        assert sorted(await take(jobs, 2)) == [("created", backend.job), ("created", f"{backend.job}-next")]
        await store.write(nodes[3], b"1")
        assert await take(watch, 1) == [("written", nodes[3])]
        await store.delete(f"{nodes[5]}/x")
        await store.delete(nodes[5])
        assert await take(watch, 1) == [("deleted", nodes[5])]

    backend.run(scenario)


def test_watches_of_one_prefix_each_get_every_change(backend: Backend) -> None:
    async def scenario(store: MetadataStore) -> None:
        left, right = store.watch(backend.job), store.watch(backend.job)
        await store.create(f"{backend.job}/a", b"")
        assert await take(left, 1) == [("created", f"{backend.job}/a")]
        await left.aclose()
        await store.create(f"{backend.job}/b", b"")
        assert await take(right, 2) == [("created", f"{backend.job}/a"), ("created", f"{backend.job}/b")]
        with pytest.raises(StopAsyncIteration):
            await anext(left)

    backend.run(scenario)


@pytest.mark.parametrize("prefix", ["", "/nodes"])
@pytest.mark.parametrize("closed", ["watch", "store"])
def test_closing_a_watch_or_the_store_ends_the_wait_for_a_change(backend: Backend, prefix: str, closed: str) -> None:
    async def scenario(store: MetadataStore) -> None:
        watch = store.watch(backend.job + prefix)
        seen: asyncio.Queue[str] = asyncio.Queue()

        async def follow() -> None:
            async for change in watch:
                seen.put_nowait(change.path)

        following = asyncio.create_task(follow())
        await store.create(f"{backend.job}{prefix}/a", b"")
        assert await seen.get() == f"{backend.job}{prefix}/a"
        await (watch.aclose() if closed == "watch" else store.close())
        await following
        assert seen.empty()

    backend.run(scenario)


def test_a_closed_store_refuses_everything(backend: Backend) -> None:
    async def scenario(store: MetadataStore) -> None:
        await asyncio.gather(store.close(), store.close())
        await store.close()
        for call in (
            store.get("/a"),
            store.children("/a"),
            store.create(f"{backend.job}/a", b""),
            store.write("/a", b""),
            store.delete("/a"),
            store.multi([Create(f"{backend.job}/a", b"")]),
        ):
            with pytest.raises(Refused, match="closed"):
                await call
        with pytest.raises(Refused, match="closed"):
            store.watch("/a")

    backend.run(scenario)
