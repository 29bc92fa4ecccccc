"""Workspaces, keys and files, on both databases."""

from __future__ import annotations

import asyncio

import pytest

from engines.errors import AlreadyExists, NotFound
from frontend.batches.keys import make_key
from frontend.batches.store.errors import InputInUse, QuotaExceeded
from frontend.batches.store.rows import NewFile, WrittenFile
from store_world import SHA, World


def test_key_is_found_by_hash_until_and_after_revocation(world: World) -> None:
    workspace = world.workspace("acme")
    key = make_key()
    keys = world.store.keys
    made = world.run(keys.create_key(key.id, workspace.id, "member", "ci", key.prefix, key.key_hash))
    assert world.run(keys.find_key(key.key_hash)) == made
    assert made.revoked_at is None
    assert world.run(keys.find_key("1" * 64)) is None
    revoked = world.run(keys.revoke_key(key.id))
    assert revoked.revoked_at is not None
    world.advance(10)
    assert world.run(keys.revoke_key(key.id)) == revoked
    assert world.run(keys.find_key(key.key_hash)) == revoked
    assert key.secret not in repr(world.sql("SELECT * FROM api_keys"))


def test_keys_refuse_unknown_workspaces_and_used_hashes(world: World) -> None:
    workspace = world.workspace("acme")
    keys = world.store.keys
    with pytest.raises(NotFound):
        world.run(keys.create_key("k1", "ws_none", "member", "", "p", SHA))
    world.run(keys.create_key("k1", workspace.id, "auditor", "", "p", SHA))
    with pytest.raises(AlreadyExists):
        world.run(keys.create_key("k2", workspace.id, "member", "", "p", SHA))
    with pytest.raises(AlreadyExists):
        world.workspace("acme")
    with pytest.raises(NotFound):
        world.run(keys.revoke_key("k9"))
    other = world.workspace("other")
    world.run(keys.create_key("k3", other.id, "platform_admin", "", "p", "2" * 64))
    assert [key.id for key in world.run(keys.list_keys())] == ["k1", "k3"]
    assert [key.id for key in world.run(keys.list_keys(other.id))] == ["k3"]
    assert world.run(keys.workspace("other")) == world.run(keys.workspace(other.id)) == other


def test_file_is_seen_only_while_committed_listed_alive_and_by_its_workspace(world: World) -> None:
    mine, theirs = world.workspace(), world.workspace()
    files = world.store.files
    new = NewFile("file-1", mine.id, "user_file", "batch", "a", "t", "p", expires_in_us=3600_000_000)
    world.run(files.insert(new))
    assert world.run(files.get(mine.id, "file-1")) is None
    committed = world.run(files.commit(WrittenFile("file-1", 5, SHA)))
    assert committed.bytes == 5
    assert world.run(files.commit(WrittenFile("file-1", 5, SHA))) == committed
    assert world.run(files.get(mine.id, "file-1")) == committed
    assert world.run(files.get(theirs.id, "file-1")) is None
    assert world.run(files.delete(theirs.id, "file-1")) is None
    hidden = world.file(mine.id, api_purpose=None)
    assert world.run(files.get(mine.id, hidden.id)) is None
    assert world.run(files.get_internal(hidden.id)) == hidden
    world.advance(3601)
    assert world.run(files.get(mine.id, "file-1")) is None
    assert world.run(files.list_files(mine.id, 10)).rows == ()


def test_delete_answers_once_and_then_none(world: World) -> None:
    """ST-03."""
    workspace = world.workspace()
    file = world.file(workspace.id)
    deleted = world.run(world.store.files.delete(workspace.id, file.id))
    assert deleted is not None
    assert deleted.deleted_at is not None
    assert world.run(world.store.files.delete(workspace.id, file.id)) is None
    with pytest.raises(NotFound):
        world.run(world.store.files.commit(WrittenFile(file.id, 1, SHA)))


def test_input_that_a_deferred_validation_reads_is_kept(world: World) -> None:
    """ST-03: afterwards the private copy is read, and the input may go."""
    workspace = world.workspace()
    batch = world.batch(workspace.id, 0, work_file=None)
    with pytest.raises(InputInUse):
        world.run(world.store.files.delete(workspace.id, batch.input_file_id))
    world.run(world.store.runner.take("r1", 60_000_000, 1))
    work = WrittenFile(f"file-work-{batch.id}", 3, SHA)
    assert world.run(world.store.runner.accept_input("r1", batch.id, work, 3, "m"))
    assert world.run(world.store.files.delete(workspace.id, batch.input_file_id)) is not None
    assert world.get(batch).request_total == 3


def test_listing_pages_through_everything_in_both_orders(world: World) -> None:
    workspace, other = world.workspace(), world.workspace()
    made = [world.file(workspace.id, api_purpose="batch" if i % 2 else "evals").id for i in range(7)]
    world.file(other.id)
    files = world.store.files
    for order, expected in (("asc", made), ("desc", made[::-1])):
        seen: list[str] = []
        after = None
        while True:
            page = world.run(files.list_files(workspace.id, 3, after=after, order=order))
            seen += [row.id for row in page.rows]
            if not page.has_more:
                break
            after = seen[-1]
        assert seen == expected
    batch_only = world.run(files.list_files(workspace.id, 10, api_purpose="batch")).rows
    assert [row.id for row in batch_only] == made[1::2][::-1]
    # A cursor survives the deletion of the row it names.
    world.run(files.delete(workspace.id, made[3]))
    assert [row.id for row in world.run(files.list_files(workspace.id, 10, after=made[3])).rows] == made[2::-1]
    with pytest.raises(NotFound):
        world.run(files.list_files(other.id, 10, after=made[3]))


def test_quota_counts_what_is_listed_and_holds_against_two_at_once(world: World) -> None:
    workspace = world.workspace()
    files = world.store.files
    world.file(workspace.id, 60)
    world.file(workspace.id, 1000, api_purpose=None)
    assert world.run(files.stored_bytes(workspace.id)) == 60
    for name in ("file-a", "file-b"):
        world.run(files.insert(NewFile(name, workspace.id, "user_file", "batch", "a", "t", "p")))

    async def both() -> list[object]:
        return await asyncio.gather(
            files.commit(WrittenFile("file-a", 30, SHA), 100),
            files.commit(WrittenFile("file-b", 30, SHA), 100),
            return_exceptions=True,
        )

    answers = world.run(both())
    assert sum(isinstance(answer, QuotaExceeded) for answer in answers) == 1
    assert world.run(files.stored_bytes(workspace.id)) == 90


def test_sweep_names_deleted_expired_and_abandoned_objects_once(world: World) -> None:
    workspace = world.workspace()
    files = world.store.files
    kept = world.file(workspace.id)
    gone = world.file(workspace.id)
    world.file(workspace.id, id="file-expiring", expires_in_us=10_000_000)
    world.run(files.insert(NewFile("file-torn", workspace.id, "user_file", "batch", "a", "t", "p")))
    world.run(files.delete(workspace.id, gone.id))
    day_us = 24 * 3600 * 1_000_000
    assert [file.id for file in world.run(files.to_sweep(10, day_us))] == [gone.id]
    world.advance(24 * 3600 + 1)
    swept = [file.id for file in world.run(files.to_sweep(10, day_us))]
    assert sorted(swept) == sorted([gone.id, "file-expiring", "file-torn"])
    world.run(files.mark_swept(swept))
    assert world.run(files.to_sweep(10, day_us)) == ()
    assert world.run(files.get(workspace.id, kept.id)) == kept
    with pytest.raises(NotFound):
        world.run(files.commit(WrittenFile("file-torn", 1, SHA)))
