"""Ray's Jobs server: submit, follow, stop. Through its SDK; the token, if any, comes from the user's environment."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from p3o_launch.errors import RunError

POLL_S = 0.5
STOP_S = 60.0
LOST_CONTACT_S = 60.0
AGENT_S = 60.0
_NO_AGENT = "No available agent"
_OVERRIDES = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")


@dataclass(frozen=True, slots=True)
class JobState:
    """What the server says of a job. ``status``: PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED."""

    status: str
    message: str
    exit_code: int | None

    @property
    def ended(self) -> bool:
        return self.status in ("STOPPED", "SUCCEEDED", "FAILED")


class JobServer:
    """A connection to the Jobs server of a cluster. Raises RunError where it cannot be reached."""

    def __init__(self, address: str) -> None:
        from ray.job_submission import JobSubmissionClient

        self.address = address
        # The SDK lets these win over the address it is given.
        hidden = {name: os.environ.pop(name) for name in _OVERRIDES if name in os.environ}
        try:
            with _as_run_error(f"cannot reach the Jobs server at {address}"):
                self._client: Any = JobSubmissionClient(address)
        finally:
            os.environ.update(hidden)

    def submit(self, submission_id: str, words: Sequence[str], runtime_env: Mapping[str, Any]) -> None:
        """Start a job. ``words``: the command; each reaches it as it is, through the one shell that Ray runs."""
        with _as_run_error("the job was not accepted"):
            deadline = time.monotonic() + AGENT_S
            while True:
                try:
                    self._client.submit_job(
                        entrypoint=shlex.join(words), submission_id=submission_id, runtime_env=dict(runtime_env)
                    )
                    return
                except RuntimeError as error:
                    # A head that has just come up answers before the agent that runs its jobs does.
                    if _NO_AGENT not in str(error) or time.monotonic() > deadline:
                        raise
                    time.sleep(POLL_S)

    def state(self, submission_id: str) -> JobState:
        """How the job stands."""
        with _as_run_error(f"the Jobs server at {self.address} does not answer"):
            info = self._client.get_job_info(submission_id)
        return JobState(str(info.status.value), info.message or "", info.driver_exit_code)

    def follow(self, submission_id: str, write: Callable[[str], None], should_stop: Callable[[], bool]) -> JobState:
        """Pass the job's output to ``write`` until it ends; the last state.

        When asked to stop, the job is stopped first. A server that does not answer is asked again for a minute.
        """
        return asyncio.run(self._follow(submission_id, write, should_stop))

    async def _follow(self, name: str, write: Callable[[str], None], should_stop: Callable[[], bool]) -> JobState:
        shown = Shown(write)
        tail = asyncio.create_task(self._tail(name, shown))
        silent_since: float | None = None
        stopping = False
        try:
            while True:
                try:
                    state = await asyncio.to_thread(self.state, name)
                    silent_since = None
                except RunError:
                    silent_since = silent_since or time.monotonic()
                    if time.monotonic() - silent_since > LOST_CONTACT_S:
                        raise
                    state = JobState("RUNNING", "", None)
                if state.ended:
                    break
                if should_stop() and not stopping:
                    stopping = True
                    await asyncio.to_thread(self._ask_to_stop, name)
                if tail.done():  # the stream broke: start it again, without what was shown
                    shown.restart()
                    tail = asyncio.create_task(self._tail(name, shown))
                await asyncio.sleep(POLL_S)
            # The server closes the stream when the last line is out.
            await asyncio.wait([tail], timeout=10)
        finally:
            tail.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await tail
        return state

    async def _tail(self, name: str, shown: Shown) -> None:
        with contextlib.suppress(Exception):  # the state, not the stream, says how a job stands
            async for text in self._client.tail_job_logs(name):
                shown(text)

    def _ask_to_stop(self, name: str) -> None:
        with _as_run_error(f"the job {name} cannot be stopped"):
            self._client.stop_job(name)

    def stop(self, submission_id: str, timeout_s: float = STOP_S) -> JobState:
        """Stop the job and wait for its end, at most ``timeout_s`` [s]; the last state."""
        self._ask_to_stop(submission_id)
        deadline = time.monotonic() + timeout_s
        while True:
            state = self.state(submission_id)
            if state.ended or time.monotonic() > deadline:
                return state
            time.sleep(POLL_S)


class Shown:
    """Passes text on, and after ``restart`` leaves out as much as was passed on already."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._count = 0
        self._skip = 0

    def restart(self) -> None:
        self._skip = self._count

    def __call__(self, text: str) -> None:
        fresh = text[self._skip :]
        self._skip = max(0, self._skip - len(text))
        if fresh:
            self._count += len(fresh)
            self._write(fresh)


@contextlib.contextmanager
def _as_run_error(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the SDK raises RuntimeError, ConnectionError and those of its HTTP client
        reason = [line for line in str(error).strip().splitlines() if line.strip()]
        raise RunError(
            f"{what}: {reason[-1].strip() if reason else type(error).__name__}",
            hint="the Jobs server is the dashboard's address, http://HOST:8265; a cluster with access tokens wants "
            "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN",
        ) from error
