"""Where the compiled hot path spends its time: mypyc's names, what perf prints, and whose time a sample is."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from bench import profile_report, recording, stacks, stages
from bench.peers.generators import H2LOAD_WARM_UP_MS, Sample, caused
from bench.sampling import NoProfile
from bench.stacks import Account, Stack
from bench.symbols import Symbols, compiled_modules, shortest_ends

ROOT = Path(__file__).resolve().parents[2]
MODULES = [
    "frontend/app", "frontend/httpd/outlet", "frontend/httpd/protocol", "frontend/http2/protocol",
    "frontend/kserve/json_data", "worker/dispatch", "worker/channel/attachment", "worker/channel/arena",
]  # fmt: skip
SYMBOLS = Symbols(MODULES)

RECORDED = """\
26488/26488 39505.176973:
\tffffffff81e3513e sock_def_readable+0x3e ([kernel.kallsyms])
\tffffffff82010ddb tcp_sendmsg ([kernel.kallsyms])
\tffffffff81e2eed9 sock_write_iter ([kernel.kallsyms])
\tffffffff816bba2a ksys_write ([kernel.kallsyms])
\tffffffff821ef691 do_syscall_64 ([kernel.kallsyms])
\tffffffff81000130 entry_SYSCALL_64_after_hwframe ([kernel.kallsyms])
\t           f838f __GI___libc_write (/usr/lib/x86_64-linux-gnu/libc.so.6)
\t           a3902 __pyx_f_6uvloop_4loop_8UVStream__try_write (/lib/uvloop/loop.cpython-311-x86_64-linux-gnu.so)
\t           f92f5 PyObject_VectorcallMethod (/usr/bin/python3.11)
\t           1681d CPyDef_outlet___Outlet___flush (/tree/ringserve__mypyc.cpython-311-x86_64-linux-gnu.so)
\t           19b38 CPyDef_attachment___Attachment____take_replies (/tree/ringserve__mypyc.cpython-311.so)
\t          1383f8 uv__io_poll (/lib/uvloop/loop.cpython-311-x86_64-linux-gnu.so)
\tffffffffffffffff [unknown] ([unknown])

26488/26488 39505.178973:
\t           d4aa0 [unknown] (/usr/bin/python3.11)
\t           e3489 PyDict_GetItemWithError (/usr/bin/python3.11)
\t           19b38 CPyDef_attachment___Attachment____take_replies.localalias (/tree/ringserve__mypyc.cpython-311.so)
\t          1383f8 uv__io_poll (/lib/uvloop/loop.cpython-311-x86_64-linux-gnu.so)

26490/26495 39505.180973:
\t           15000 [unknown] (/lib/python3.11/site-packages/onnxruntime/capi/state.so)
\t           19b38 CPyDef_dispatch___Dispatcher___execute (/tree/ringserve__mypyc.cpython-311.so)

26488/26488 39505.182973:
\t           16000 [unknown] (/usr/bin/python3.11)
\t          1383f8 uv__io_poll (/lib/uvloop/loop.cpython-311-x86_64-linux-gnu.so)

26490/26490 39505.184973:
\t           16000 _PyEval_EvalFrameDefault (/usr/bin/python3.11 (deleted))

26490/26490 39505.186973:
\tffffffff81e35111 finish_task_switch.isra.0 ([kernel.kallsyms])
\tffffffff81e35112 schedule ([kernel.kallsyms])
\tffffffff81e35113 exit_to_user_mode_loop ([kernel.kallsyms])
\tffffffff81e35114 do_syscall_64 ([kernel.kallsyms])
"""


def samples() -> list[Stack]:
    return list(stacks.read(RECORDED.splitlines(keepends=True)))


# Names


def test_modules_are_named_by_the_shortest_end_that_tells_them_apart() -> None:
    ends = shortest_ends(MODULES)
    assert ends["frontend/app"] == "app"
    assert ends["frontend/httpd/protocol"] == "httpd/protocol"
    assert ends["frontend/http2/protocol"] == "http2/protocol"
    assert shortest_ends(["protocol", "http2/protocol"]) == {"protocol": "protocol", "http2/protocol": "http2/protocol"}


@pytest.mark.parametrize(
    ("symbol", "frame"),
    [
        ("CPyDef_outlet___Outlet___flush", "Outlet.flush (frontend/httpd/outlet.py)"),
        ("CPyPy_outlet___Outlet___flush", "Outlet.flush (frontend/httpd/outlet.py)"),
        ("CPyDef_httpd___protocol___Connection____start", "Connection._start (frontend/httpd/protocol.py)"),
        ("CPyDef_http2___protocol___Http2Protocol___flush.part.0", "Http2Protocol.flush (frontend/http2/protocol.py)"),
        ("CPyDef_json_data____pack_by_simd.localalias", "_pack_by_simd (frontend/kserve/json_data.py)"),
        ("CPyDef_arena_____mypyc__Span_setup", "__mypyc__Span_setup (worker/channel/arena.py)"),
        ("arena___Span_dealloc", "Span_dealloc (worker/channel/arena.py)"),
        ("CPyDef_app___infer_FrontendApp_gen_____next__", "FrontendApp.infer (frontend/app.py)"),
        ("CPyDef_unheard___Of___it", None),
        ("PyDict_GetItemWithError", None),
        ("[unknown]", None),
    ],
)
def test_symbols_are_functions_of_ours(symbol: str, frame: str | None) -> None:
    assert SYMBOLS.frame(symbol) == frame


def test_nothing_compiled_names_nothing() -> None:
    assert Symbols([]).frame("CPyDef_outlet___Outlet___flush") is None


def test_compiled_modules_are_those_with_an_extension_beside_them(tmp_path: Path) -> None:
    (tmp_path / "worker" / "channel").mkdir(parents=True)
    for name in ("worker/gather.py", "worker/gather.cpython-311-x86_64-linux-gnu.so", "worker/channel/ring.py",
                 "ringserve__mypyc.cpython-311-x86_64-linux-gnu.so", "other.py", "other.so"):  # fmt: skip
        (tmp_path / name).touch()
    assert compiled_modules(tmp_path) == ["worker/gather"]


def test_the_names_are_mypycs_own() -> None:
    """The rule is mypyc's, whose next version may choose another one."""
    namegen = pytest.importorskip("mypyc.namegen")
    text = (ROOT / "scripts" / "compile.py").read_text()
    modules = [
        f"{package}/{name}"
        for package, names in re.findall(r'^        "([a-z0-9_/]+)": "([a-z0-9_ ]+)",$', text, re.MULTILINE)
        for name in names.split()
    ]
    assert len(modules) > 30
    theirs = namegen.make_module_translation_map([module.replace("/", ".") for module in modules])
    ours = {module.replace("/", "."): end.replace("/", ".") + "." for module, end in shortest_ends(modules).items()}
    assert ours == theirs


# Stacks


def test_perfs_text_is_read_whole() -> None:
    found = samples()
    assert [(one.pid, one.tid) for one in found] == [
        (26488, 26488), (26488, 26488), (26490, 26495), (26488, 26488), (26490, 26490), (26490, 26490),
    ]  # fmt: skip
    assert found[0].at_s == 39505.176973
    assert found[0].frames[0] == stacks.Frame("sock_def_readable", stacks.KERNEL)
    assert found[4].frames == (stacks.Frame("_PyEval_EvalFrameDefault", "/usr/bin/python3.11 (deleted)"),)
    assert list(stacks.read(["no sample\n", "\t 16000 lost (frame)\n"])) == []


def test_time_is_the_kernels_a_librarys_or_our_innermost_functions() -> None:
    assert [stacks.row_of(one, SYMBOLS) for one in samples()] == [
        "kernel: write sockets", stages.stage_of(["Attachment._take_replies (worker/channel/attachment.py)"]),
        "library: ONNX Runtime", stacks.IN_LOOP, stacks.NOT_COMPILED, "kernel: preempted by another process",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("symbols", "name"),
    [
        (["ep_poll_callback", "eventfd_write", "vfs_write", "ksys_write", "do_syscall_64"], "doorbells (eventfd)"),
        (["tcp_poll", "do_epoll_wait", "__x64_sys_epoll_wait"], "epoll"),
        (["vfs_read", "ksys_read", "do_syscall_64"], "begin and end of reads and writes"),
        (["futex_wake", "do_futex", "__x64_sys_futex"], "futex"),
        (["smp_call_function", "membarrier_private_expedited", "__do_sys_membarrier"], "memory barriers"),
        (["schedule", "exit_to_user_mode_loop", "asm_sysvec_apic_timer_interrupt"], "interrupts"),
        (["clear_page", "handle_mm_fault", "asm_exc_page_fault"], "page faults"),
        (["do_syscall_64"], "other"),
    ],
)
def test_the_kernels_time_is_told_by_what_it_was_called_for(symbols: list[str], name: str) -> None:
    frames = tuple(stacks.Frame(symbol, stacks.KERNEL) for symbol in symbols)
    assert stacks.row_of(Stack(1, 1, 0.0, frames), SYMBOLS) == f"kernel: {name}"


def test_the_rows_of_a_process_add_up_to_its_processor_time() -> None:
    account = Account()
    for one in samples():
        account.add(one, SYMBOLS)
    rows, functions = account.costs_us(12.0, 2)
    assert sum(rows.values()) == 12.0
    assert rows["library: ONNX Runtime"] == 2.0
    assert len(functions) == 2
    account.add(samples()[2], SYMBOLS)
    assert account.functions == Counter(
        {
            "Dispatcher.execute (worker/dispatch.py)": 2, "Outlet.flush (frontend/httpd/outlet.py)": 1,
            "Attachment._take_replies (worker/channel/attachment.py)": 1, "python3.11": 1,
            "_PyEval_EvalFrameDefault (python3.11 (deleted))": 1,
            "finish_task_switch.isra.0 ([kernel.kallsyms])": 1,
        }
    )  # fmt: skip


# Recording


def program(folder: Path, name: str, text: str) -> None:
    file = folder / name
    file.write_text(f"#!{sys.executable}\n{text}\n")
    file.chmod(0o755)


def test_a_recording_is_read_by_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "perf", f"print({RECORDED!r})")
    monkeypatch.setenv("PATH", str(tmp_path))
    found, span_s = recording.accounts(tmp_path / "data", {26488: "frontend", 26490: "worker"}, SYMBOLS)
    assert {role: account.rows.total() for role, account in found.items()} == {"frontend": 3, "worker": 3}
    assert round(span_s, 6) == 0.01
    with pytest.raises(NoProfile, match="no sample"):
        recording.accounts(tmp_path / "data", {1: "frontend"}, SYMBOLS)


def test_what_perf_says_when_it_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "perf", "import sys; sys.exit('not permitted')")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(recording, "SETTLE_S", 0.0)
    running = recording.Recording(tmp_path / "data", [1], 0.0)
    running.start()
    with pytest.raises(NoProfile, match="perf record: not permitted"):
        running.finish()
    with pytest.raises(NoProfile, match="perf script ended with 1: not permitted"):
        recording.accounts(tmp_path / "data", {}, SYMBOLS)
    assert recording.missing() == "perf may not record: not permitted"


def test_a_machine_without_perf_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert recording.missing().startswith("perf is not installed")


def test_h2loads_warm_up_counts_as_load() -> None:
    sample = Sample(1000, 3.0, 1.0, 1.0, 1.0, 0)
    assert caused(sample, "v2bin") == 1000
    assert caused(sample, "grpc") == pytest.approx(1000 * (3 + H2LOAD_WARM_UP_MS / 1e3) / 3)


def test_the_report_of_a_recording_adds_up() -> None:
    role = {
        "processes": 2, "cpu_us": 10.0, "cpu_us_recorded": 10.5, "user_us": 7.0, "system_us": 3.0, "samples": 5000,
        "seen": 0.99, "stages_us": {"checks": 9.9, "route": 0.04, "encode": 0.06},
        "functions_us": {"check (x.py)": 4.75},
    }  # fmt: skip
    run = {
        "format": "v2bin", "concurrency": 64, "per_s": 2000.0, "per_s_recorded": 1900.0, "errors": 0, "client_us": 5.25,
        "server_cores": 1.5, "client_cores": 0.3, "other_cores": 0.1, "roles": {"frontend": role},
    }  # fmt: skip
    text = profile_report.text_of({"model": "m", "under_load": [run]})
    for shown in (
        "**m, 64 callers, v2bin, compiled**: 2000/s (1900/s while recording), 0 errors",
        "10.0 us of the server's and 5.2 us of the client's", "| frontend (2 processes) | us |", "| checks | 9.90 |",
        "| encode | 0.06 |", "| 1 smaller ones | 0.04 |", "| charged: 7.00 user, 3.00 system | 10.00 |",
        "5000 samples, which are 99% of those to expect", "check (x.py) 4.75",
    ):  # fmt: skip
        assert shown in text


def test_profile_says_what_it_can_do() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "profile.py"), "--help"], capture_output=True, text=True, check=True
    )
    assert "--interpreted" in done.stdout
