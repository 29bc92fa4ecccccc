"""What a scan finds, what it says about the rest, and when a fingerprint changes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

import onnx_models
from engines.bundle.manifest import ManifestError
from engines.bundle.repository import (
    MAX_BUNDLES,
    MAX_VERSIONS,
    BrokenBundle,
    Bundle,
    Changes,
    RepositoryError,
    diff,
    fingerprint,
    load_manifest,
    scan,
    scan_bundle,
)

MANIFEST = """format_version: "1"
executable_inputs: [{name: x, dtype: f32, shape: na, dims: {a: 4}}]
executable_outputs: [{name: y, dtype: f32, shape: na, dims: {a: 4}}]
"""


def model(directory: Path, file_name: str = "model.onnx") -> Path:
    node = helper.make_node("Relu", ["x"], ["y"])
    values = [onnx_models.value(name, "f32", ["n", 4]) for name in ("x", "y")]
    return onnx_models.write(directory, [node], values[:1], values[1:], file_name=file_name)


def only(found: list[Bundle | BrokenBundle]) -> Bundle:
    (bundle,) = found
    assert isinstance(bundle, Bundle), bundle
    return bundle


def broken(root: Path, name: str = "m") -> str:
    (entry,) = scan(root)
    assert isinstance(entry, BrokenBundle), entry
    assert entry.name == name
    return entry.reason


def test_manifest_beside_model(tmp_path: Path) -> None:
    path = model(tmp_path / "m")
    (tmp_path / "m" / "manifest.yaml").write_text(MANIFEST)
    (tmp_path / "m" / "model.py").touch()
    bundle = only(scan(tmp_path))
    assert (bundle.name, bundle.version, bundle.path, bundle.model_file) == ("m", "1", tmp_path / "m", path)
    assert (bundle.manifest_path, bundle.model_py) == (tmp_path / "m" / "manifest.yaml", tmp_path / "m" / "model.py")
    assert not load_manifest(bundle).derived


def test_bare_model_file_gets_a_derived_manifest(tmp_path: Path) -> None:
    model(tmp_path / "m")
    bundle = only(scan(tmp_path))
    assert (bundle.manifest_path, bundle.model_py, bundle.notes) == (None, None, ())
    assert load_manifest(bundle).derived


def test_triton_layout_ignores_its_configuration_and_says_so(tmp_path: Path) -> None:
    model(tmp_path / "m" / "1")
    (tmp_path / "m" / "config.pbtxt").touch()
    bundle = only(scan(tmp_path))
    assert (bundle.version, bundle.path) == ("1", tmp_path / "m" / "1")
    assert "config.pbtxt is ignored" in bundle.notes[0]
    assert load_manifest(bundle).derived


def test_versions_ascend_as_numbers_with_own_or_shared_files(tmp_path: Path) -> None:
    root = tmp_path / "m"
    for version in ("10", "9", "2"):
        model(root / version)
    (root / "manifest.yaml").write_text(MANIFEST)
    (root / "model.py").touch()
    (root / "9" / "manifest.yaml").write_text(MANIFEST)
    (root / "10" / "model.py").touch()
    found = [bundle for bundle in scan(tmp_path) if isinstance(bundle, Bundle)]
    assert [bundle.version for bundle in found] == ["2", "9", "10"]
    assert [bundle.manifest_path for bundle in found] == [
        root / "manifest.yaml",
        root / "9" / "manifest.yaml",
        root / "manifest.yaml",
    ]
    assert [bundle.model_py for bundle in found] == [root / "model.py", root / "model.py", root / "10" / "model.py"]


def test_model_key_names_another_file(tmp_path: Path) -> None:
    path = model(tmp_path / "m", "net.onnx")
    (tmp_path / "m" / "manifest.yaml").write_text(MANIFEST + "model: net.onnx\n")
    assert only(scan(tmp_path)).model_file == path


def test_files_and_hidden_directories_are_ignored(tmp_path: Path) -> None:
    model(tmp_path / ".hidden")
    (tmp_path / "readme.md").touch()
    model(tmp_path / "m" / "1")
    model(tmp_path / "m" / ".2")
    assert [entry.version for entry in scan(tmp_path)] == ["1"]


def test_links_are_followed(tmp_path: Path) -> None:
    path = model(tmp_path / "store" / "blob", "x")
    repository = tmp_path / "repository"
    (repository / "m").mkdir(parents=True)
    (repository / "m" / "model.onnx").symlink_to(path)
    (repository / "linked").symlink_to(repository / "m")
    assert [entry.name for entry in scan(repository) if isinstance(entry, Bundle)] == ["linked", "m"]


@pytest.mark.parametrize("name", ["a b", "ä", "a:b", "a\n", "x" * 200 + "é"])
def test_odd_names_are_broken_not_lost(tmp_path: Path, name: str) -> None:
    model(tmp_path / name)
    assert "rename the directory" in broken(tmp_path, name)


def test_name_that_is_not_utf8_can_be_shown(tmp_path: Path) -> None:
    os.mkdir(os.fsencode(tmp_path) + b"/m\xff")
    broken(tmp_path, "m\ufffd").encode()


@pytest.mark.parametrize("version", ["0", "01", "1" * 30])
def test_odd_versions_are_broken_and_the_others_serve(tmp_path: Path, version: str) -> None:
    model(tmp_path / "m" / version)
    model(tmp_path / "m" / "2")
    states = {entry.version: type(entry) for entry in scan(tmp_path)}
    assert states == {version: BrokenBundle, "2": Bundle}


def test_empty_directory_is_a_broken_bundle(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    assert "neither manifest.yaml nor model.onnx" in broken(tmp_path)


def test_model_file_under_another_name_is_pointed_out(tmp_path: Path) -> None:
    model(tmp_path / "m", "net.onnx")
    assert "found net.onnx: rename it, or name it with 'model:'" in broken(tmp_path)


def test_model_file_missing_beside_a_manifest(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "manifest.yaml").write_text(MANIFEST)
    assert broken(tmp_path) == f"model file {tmp_path / 'm' / 'model.onnx'} does not exist"


def test_model_file_that_is_empty_a_directory_or_a_dangling_link(tmp_path: Path) -> None:
    file = tmp_path / "m" / "model.onnx"
    file.parent.mkdir()
    file.touch()
    assert "is empty" in broken(tmp_path)
    file.unlink()
    file.mkdir()
    assert "is a directory, expected a file" in broken(tmp_path)
    file.rmdir()
    file.symlink_to(tmp_path / "gone")
    assert "is a link to a file that does not exist" in broken(tmp_path)
    file.unlink()
    os.mkfifo(file)
    assert "is not a regular file" in broken(tmp_path)


def test_model_file_that_links_to_itself(tmp_path: Path) -> None:
    file = tmp_path / "m" / "model.onnx"
    file.parent.mkdir()
    file.symlink_to(file)
    assert "cannot be read" in broken(tmp_path)


def test_manifest_that_cannot_be_opened_is_broken_not_raised(tmp_path: Path) -> None:
    model(tmp_path / "m")
    (tmp_path / "m" / "manifest.yaml").mkdir()
    assert "manifest.yaml is not a regular file" in broken(tmp_path)


@pytest.mark.parametrize("name", ["manifest.yaml", "model.py", "model.onnx"])
def test_a_pipe_is_told_and_not_waited_for(tmp_path: Path, name: str) -> None:
    model(tmp_path / "m")
    (tmp_path / "m" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "m" / name)
    assert f"{name} is not a regular file" in broken(tmp_path)


def test_a_directory_that_links_to_itself_costs_the_others_nothing(tmp_path: Path) -> None:
    model(tmp_path / "m")
    (tmp_path / "round").symlink_to("round")
    (tmp_path / "m" / "2").symlink_to("2")
    (tmp_path / "m" / "1").mkdir()
    found = {(bundle.name, bundle.version): bundle for bundle in scan(tmp_path)}
    assert set(found) == {("m", "1"), ("m", "2"), ("round", "")}
    for key in (("m", "2"), ("round", "")):
        bundle = found[key]
        assert isinstance(bundle, BrokenBundle)
        assert "Too many levels of symbolic links" in bundle.reason


def test_model_outside_the_bundle_is_a_mistake_of_the_manifest(tmp_path: Path) -> None:
    model(tmp_path / "m")
    (tmp_path / "m" / "manifest.yaml").write_text(MANIFEST + "model: ../other.onnx\n")
    with pytest.raises(ManifestError, match=r"name of a file inside the bundle, found '\.\./other\.onnx'"):
        load_manifest(only(scan(tmp_path)))


def test_client_tensors_need_the_model_py_that_the_scan_found(tmp_path: Path) -> None:
    model(tmp_path / "m")
    (tmp_path / "m" / "manifest.yaml").write_text(MANIFEST + "client_inputs: [{name: T, dtype: bytes, shape: n}]\n")
    with pytest.raises(ManifestError, match=r"no model\.py"):
        load_manifest(only(scan(tmp_path)))
    (tmp_path / "m" / "model.py").touch()
    assert load_manifest(only(scan(tmp_path))).client_inputs[0].name == "T"


def test_repository_that_is_missing_a_file_or_a_bundle(tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match="does not exist; create it or name another one"):
        scan(tmp_path / "gone")
    (tmp_path / "file").touch()
    with pytest.raises(RepositoryError, match="is a file, expected a directory of bundles"):
        scan(tmp_path / "file")
    model(tmp_path / "m")
    with pytest.raises(RepositoryError, match=r"holds model\.onnx, so it is a bundle itself; pass the directory above"):
        scan(tmp_path / "m")


def test_empty_repository_has_no_bundles(tmp_path: Path) -> None:
    assert scan(tmp_path) == []


def test_one_bundle_can_be_scanned_alone(tmp_path: Path) -> None:
    model(tmp_path / "m")
    assert scan_bundle(tmp_path / "m") == scan(tmp_path)


def test_too_many_versions_or_bundles_are_told_with_the_limit(tmp_path: Path) -> None:
    for version in range(1, MAX_VERSIONS + 2):
        (tmp_path / "m" / str(version)).mkdir(parents=True)
    assert f"{MAX_VERSIONS + 1} version directories, the limit is {MAX_VERSIONS}" in broken(tmp_path)
    for number in range(MAX_BUNDLES):
        (tmp_path / f"b{number}").mkdir()
    with pytest.raises(RepositoryError, match=f"{MAX_BUNDLES + 1} directories, the limit is {MAX_BUNDLES}"):
        scan(tmp_path)


def prints(root: Path) -> dict[tuple[str, str], object]:
    return {(entry.name, entry.version): fingerprint(entry) for entry in scan(root)}


def test_documentation_and_left_over_files_change_nothing(tmp_path: Path) -> None:
    model(tmp_path / "m" / "1")
    before = prints(tmp_path)
    for name in ("README.md", "LICENSE", ".model.onnx.swp", "config.pbtxt", "model.onnx.part", "notes.rst", "x~"):
        (tmp_path / "m" / "1" / name).write_text("x")
        (tmp_path / "m" / name).write_text("x")
    (tmp_path / "m" / "1" / "__pycache__").mkdir()
    (tmp_path / "m" / "1" / "__pycache__" / "a.py").touch()
    assert prints(tmp_path) == before


@pytest.mark.parametrize("name", ["manifest.yaml", "model.onnx", "model.py", "weights.bin", "vocabulary/words.txt"])
def test_files_that_matter_change_the_fingerprint(tmp_path: Path, name: str) -> None:
    model(tmp_path / "m")
    file = tmp_path / "m" / name
    file.parent.mkdir(exist_ok=True)
    before = prints(tmp_path)
    file.write_text(MANIFEST)
    between = prints(tmp_path)
    assert between != before
    os.utime(file, ns=(1, 1))
    assert prints(tmp_path) != between


def test_replacing_a_file_by_an_equally_old_and_long_one_is_seen(tmp_path: Path) -> None:
    file = model(tmp_path / "m")
    os.utime(file, ns=(5, 5))
    before = prints(tmp_path)
    other = tmp_path / "m" / "new.tmp"
    other.write_bytes(file.read_bytes())
    os.utime(other, ns=(5, 5))
    other.rename(file)
    assert prints(tmp_path) != before


def test_new_version_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    model(tmp_path / "m" / "1")
    (tmp_path / "m" / "manifest.yaml").write_text(MANIFEST)
    before = {(entry.name, entry.version): fingerprint(entry) for entry in scan(tmp_path)}
    model(tmp_path / "m" / "2")
    after = {(entry.name, entry.version): fingerprint(entry) for entry in scan(tmp_path)}
    assert diff(before, after) == Changes(added=(("m", "2"),), changed=(), removed=())


def test_shared_manifest_changes_every_version_that_uses_it(tmp_path: Path) -> None:
    for version in ("1", "2"):
        model(tmp_path / "m" / version)
        (tmp_path / "m" / version / "model.py").touch()
    (tmp_path / "m" / "2" / "manifest.yaml").write_text(MANIFEST)
    (tmp_path / "m" / "manifest.yaml").write_text(MANIFEST)
    before = {(entry.name, entry.version): fingerprint(entry) for entry in scan(tmp_path)}
    (tmp_path / "m" / "manifest.yaml").write_text(MANIFEST + "hooks: {mode: inline}\n")
    after = {(entry.name, entry.version): fingerprint(entry) for entry in scan(tmp_path)}
    assert diff(before, after) == Changes(added=(), changed=(("m", "1"),), removed=())


def test_a_broken_bundle_has_a_fingerprint_so_that_its_repair_is_seen(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    before = prints(tmp_path)
    model(tmp_path / "m")
    assert prints(tmp_path) != before


KEYS = st.tuples(st.sampled_from("abc"), st.sampled_from("12"))
LOOKS = st.dictionaries(KEYS, st.integers(0, 2).map(lambda size: (("f", size, 0, 0),)))


@given(LOOKS, LOOKS)
def test_diff_turns_the_old_look_into_the_new_one(
    old: dict[tuple[str, str], tuple[tuple[str, int, int, int], ...]],
    new: dict[tuple[str, str], tuple[tuple[str, int, int, int], ...]],
) -> None:
    changes = diff(old, new)
    rebuilt = {key: value for key, value in old.items() if key not in changes.removed}
    rebuilt |= {key: new[key] for key in changes.added + changes.changed}
    assert rebuilt == new
    touched = changes.added + changes.changed + changes.removed
    assert len(set(touched)) == len(touched)
    assert all(old.get(key) != new.get(key) for key in touched)
