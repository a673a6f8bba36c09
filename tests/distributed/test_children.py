"""A process and those it has started end together; here with small commands in the place of ranks."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness import RankFailure, reference, run_ranks
from titanplug.errors import TitanplugError
from titanplug.rank_errors import ERROR_DIR_VARIABLE, record_error
from titanplug.strategy import children, launcher
from titanplug.strategy.after_exception import _all_arrive
from titanplug.strategy.children import PARENT_VARIABLE, Children


def record(rank: int, text: str, after_s: float = 0.0) -> str:
    """Code of a rank that leaves an error and ends."""
    return (
        f"import json, os, sys, time; time.sleep({after_s}); d = os.environ['{ERROR_DIR_VARIABLE}']; "
        f"open(d + '/rank{rank}.json', 'w').write(json.dumps("
        f"dict(rank={rank}, time_s=time.time(), text={text!r}))); sys.exit(1)"
    )


RECORD = record(1, "ValueError: cause")


def start(*codes: str) -> Children:
    """Ranks 1, 2, ... that run Python code."""
    commands = {rank: [sys.executable, "-S", "-c", code] for rank, code in enumerate(codes, 1)}
    return Children(commands, {rank: dict(os.environ) for rank in commands}, None, len(codes) + 1)


def cause_of(*codes: str, grace_s: float = 20.0) -> str | None:
    def run() -> str | None:
        ranks = start(*codes)
        ranks.end(grace_s)
        cause = ranks.find_cause()
        return None if cause is None else str(cause)

    result: str | None = reference(run)
    return result


def test_cause_is_the_reported_error() -> None:
    assert cause_of(RECORD, "raise SystemExit(1)") == "rank 1 of 3 failed:\nValueError: cause"


def test_lost_connections_are_no_cause() -> None:
    """However early they are reported."""
    lost = record(1, "RuntimeError: Connection closed by peer")
    assert cause_of(lost, record(2, "ValueError: cause", 0.3)) == "rank 2 of 3 failed:\nValueError: cause"
    kill = "import os, signal, time; time.sleep(0.3); os.kill(os.getpid(), signal.SIGABRT)"
    assert cause_of(lost, kill) == "rank 2 of 3 failed: It was ended by SIGABRT."
    assert cause_of(lost, "pass") is None


def test_cause_without_a_report() -> None:
    """The end of what the process wrote, or the signal that ended it."""
    text = cause_of("import sys; print('noise', file=sys.stderr); 1 / 0")
    assert text is not None
    assert text.startswith("rank 1 of 2 failed: Exit code 1.\nTraceback (most recent call last)")
    assert text.endswith("ZeroDivisionError: division by zero")
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert cause_of(kill) == (
        "rank 1 of 2 failed: It was ended by SIGKILL. The system may have run out of memory."
    )
    assert cause_of("pass") is None


def test_own_error_is_no_cause_of_others() -> None:
    def run() -> Any:
        ranks = start("raise SystemExit('Connection closed by peer')")
        record_error(0, ValueError("own"))
        ranks.end()
        return ranks.find_cause()

    assert reference(run) is None


def test_ending_waits_and_then_kills() -> None:
    def run() -> tuple[float, list[int | None]]:
        ranks = start("import time; time.sleep(0.3)", "import time; time.sleep(600)")
        begin = time.monotonic()
        ranks.end(grace_s=1.0)
        seconds = time.monotonic() - begin
        return seconds, [process.returncode for process in ranks._processes.values()]

    seconds, codes = reference(run)
    assert 1.0 <= seconds < 5.0
    assert codes == [0, -signal.SIGKILL]


def test_signals_are_passed_on() -> None:
    def run() -> int | None:
        ranks = start("import time; time.sleep(600)")
        ranks.send_signal(signal.SIGTERM)
        ranks.end()
        return ranks._processes[1].returncode

    assert reference(run) == -signal.SIGTERM


def run_as_script(body: Callable[[], None], folder: Path) -> tuple[int, str]:
    """Exit code and stderr of a forked process that ends as a script does: hooks, then atexit."""
    import atexit

    error_file = folder / "stderr"
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(error_file, os.O_CREAT | os.O_WRONLY), 2)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        sys.excepthook = sys.__excepthook__
        atexit._clear()
        code = 0
        try:
            body()
        except BaseException:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            code = 1
        atexit._run_exitfuncs()
        os._exit(code)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), error_file.read_text()


def test_uncaught_error_is_last(tmp_path: Path) -> None:
    """The other ranks end first, with all that they have to say."""

    def body() -> None:
        start("import sys, time; time.sleep(0.5); print('late', file=sys.stderr, flush=True)")
        raise ValueError("own error")

    code, text = run_as_script(body, tmp_path)
    assert code == 1
    assert text.index("late") < text.index("own error")
    assert text.strip().endswith("ValueError: own error")


def test_rank_that_fails_after_this_one_is_done(tmp_path: Path) -> None:
    code, text = run_as_script(lambda: start("import time; time.sleep(0.5); 1 / 0") and None, tmp_path)
    assert code == 1
    assert text.strip().endswith("ZeroDivisionError: division by zero")


def test_all_done(tmp_path: Path) -> None:
    marker = tmp_path / "done"
    late = f"import time; time.sleep(0.5); open({str(marker)!r}, 'w')"
    assert run_as_script(lambda: start(late) and None, tmp_path) == (0, "")
    assert marker.exists()


def test_this_one_hangs_while_another_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "GRACE_S", 0.2)

    def body() -> None:
        start(RECORD)
        time.sleep(60)

    begin = time.monotonic()
    code, text = run_as_script(body, tmp_path)
    assert (code, text.strip()) == (1, "rank 1 of 2 failed:\nValueError: cause")
    assert time.monotonic() - begin < 10


def test_process_ends_with_its_parent(tmp_path: Path) -> None:
    """By the system, however the parent ends."""
    note = tmp_path / "pid"

    def parent() -> None:
        pid = os.fork()
        if pid == 0:
            os.setsid()  # the harness ends the group of a rank
            children.end_with_parent()
            assert PARENT_VARIABLE not in os.environ  # what it starts itself isn't bound
            note.write_text(str(os.getpid()))
            time.sleep(60)
        while not note.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    def run() -> None:
        os.environ[PARENT_VARIABLE] = str(os.getpid())
        parent()

    with pytest.raises(RankFailure, match="ended with exit code -9"):
        reference(run)
    pid = int(note.read_text())
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and _is_running(pid):
        time.sleep(0.02)
    assert not _is_running(pid)


def _is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_script_starts_its_ranks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After they have ended, a later call says so instead of waiting for them."""

    def run() -> str:
        launcher._children = start("pass")
        launcher._children.end()
        cluster = launcher.LightningEnvironment()
        os.environ["LOCAL_RANK"] = "0"
        with pytest.raises(TitanplugError) as caught:
            launcher.ScriptLauncher(cluster, 2, 1).launch(lambda: None)
        return str(caught.value)

    assert "have ended" in reference(run)


def test_ranks_agree_whether_all_arrive() -> None:
    """A rank that comes too late gets the answer that the others have got."""

    def meet(rank: int, world_size: int) -> list[bool]:
        together = _all_arrive("together", 20.0)
        if rank == 2:
            time.sleep(1.0)
        late = _all_arrive("late", 0.3)
        apart = _all_arrive(f"apart {rank // 2}", 0.3)
        return [together, late, apart]

    assert run_ranks(meet, 3) == [[True, False, False]] * 3


def test_reports_are_plain_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ERROR_DIR_VARIABLE, str(tmp_path))
    record_error(3, ValueError("x"))
    assert json.loads((tmp_path / "rank3.json").read_text())["rank"] == 3
