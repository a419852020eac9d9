"""How `d2amp setup` acts on the environment of this interpreter. Needs only the standard library."""

import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

from .probe import fingerprint, incomplete_distributions, probe

try:
    import fcntl
except ImportError:  # Windows: two set-ups at once are not held apart there
    fcntl = None


NEW = "new environment"  # in the lock file until the first set-up is done: anything may have been stopped half-way


def lock_file(prefix):
    """The file of an environment that set-ups lock, and in which they note what they are installing."""
    return Path(prefix) / ".d2amp-setup.lock"


class CommandFailed(Exception):
    """A program did not succeed.

    Attributes:
        status: what it ended with; below 0: the signal that ended it.
        output: what it said, as far as that was not shown.
    """

    def __init__(self, command, status, output=""):
        super().__init__(f"`{' '.join(command)}` ended with status {status}")
        self.status = status
        self.output = output


class Environment:
    """The environment of this interpreter: what the set-up looks at and acts on.

    Args:
        quiet: keep pip's output back and show it only when pip fails.
        prefix: folder of the lock and the stamp; None: that of the environment.
    """

    def __init__(self, quiet=False, prefix=None):
        self.quiet = quiet
        self._prefix = Path(prefix or sys.prefix)
        self._lock = None

    def probe(self):
        """What this interpreter imports, see `probe.probe`."""
        return probe()

    def incomplete(self):
        """What an installer was stopped in the middle of, see `probe.incomplete_distributions`."""
        return incomplete_distributions()

    def which(self, *names):
        """The path of the first of these programs that is there, or None."""
        return next(filter(None, map(shutil.which, names)), None)

    def pip(self, *arguments, env=None):
        """Runs pip of this interpreter, under whatever limits it is configured with.

        Args:
            arguments: of pip.
            env: environment variables besides those that are set.

        Raises:
            CommandFailed: there is no pip, or it ended with another status than 0.
        """
        command = [sys.executable, "-m", "pip", *arguments]
        if importlib.util.find_spec("pip") is None:
            advice = f"This Python has no pip. Type:\n    {sys.executable} -m ensurepip --upgrade\n"
            raise CommandFailed(command, 1, advice)
        print(f"+ {' '.join(command)}", flush=True)
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if self.quiet else None,
            stderr=subprocess.STDOUT if self.quiet else None,
            env={**os.environ, **(env or {})},
            text=True,
            errors="replace",
            # A pip that outlives a killed set-up keeps the lock, and the next call waits for it.
            pass_fds=[self._lock.fileno()] if self._lock and fcntl else (),
        )
        if done.returncode != 0:
            raise CommandFailed(command, done.returncode, done.stdout or "")

    def why_unreachable(self, repository, seconds):
        """Why a git repository cannot be read now, or None if it can.

        git itself is asked, since proxies and mirrors are set up there; it is ended after `seconds`.
        """
        process = subprocess.Popen(
            ["git", "ls-remote", "--exit-code", repository, "HEAD"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_SSH_COMMAND": "ssh -oBatchMode=yes", "LC_ALL": "C"},
            text=True,
            errors="replace",
            start_new_session=True,  # its helpers hold the connection, and must end with it
        )
        try:
            _, error = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"no answer within {seconds:g} s"
        finally:
            _end(process)
        if process.returncode == 0:
            return None
        return (error.strip().splitlines() or [f"git ended with status {process.returncode}"])[-1]

    def discard_leftover(self, module):
        """Removes what a stopped installation left of a top-level module: its folder and incomplete .dist-info."""
        for folder in self._leftover(module):
            print(f"Removing {folder}, left by an installation that was stopped.", flush=True)
            shutil.rmtree(folder)
        importlib.invalidate_caches()

    def _leftover(self, module):
        sites = {Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")}
        folders = [site / module for site in sites if (site / module).is_dir()]
        for folder, (name, _) in self.incomplete().items():
            if brings(name, module):
                folders.append(folder)
        return folders

    def is_inside(self, path):
        """Whether a file lies among this environment's own packages (not in those it was made from, or elsewhere)."""
        sites = {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")}
        return not sites.isdisjoint(Path(path).resolve().parents)

    @contextlib.contextmanager
    def lock(self):
        """Holds the environment for one set-up.

        Yields:
            str: what was being installed when the last set-up was stopped; "" when it came to its end; NEW.
        """
        try:
            file = open(lock_file(self._prefix), "a+", encoding="utf-8")
        except OSError:  # not ours to write to: pip will say so, or put things elsewhere
            yield ""
            return
        with file:
            if fcntl:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    print("Another set-up of this environment is running; waiting for it to end.", flush=True)
                    fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            stopped_in = file.read().strip()
            self._lock = file
            try:
                yield stopped_in
            finally:
                self._lock = None

    def mark(self, part):
        """Notes what is being installed now; "" for nothing."""
        if self._lock:
            self._lock.truncate(0)
            self._lock.write(part)
            self._lock.flush()

    def read_stamp(self):
        """The probe of the last finished set-up if nothing was installed or removed since, else None."""
        try:
            stamp = json.loads((self._prefix / ".d2amp-setup.json").read_text(encoding="utf-8"))
            return stamp["seen"] if stamp["fingerprint"] == fingerprint() else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write_stamp(self, seen):
        """Keeps a probe for `read_stamp`; an environment that cannot be written to goes without."""
        importlib.invalidate_caches()
        text = json.dumps({"fingerprint": fingerprint(), "seen": seen})
        with contextlib.suppress(OSError):
            (self._prefix / ".d2amp-setup.json").write_text(text, encoding="utf-8")


def brings(distribution, module):
    """Whether a distribution's name says that it is a build of `module` ("sal-detectron2" is one of detectron2)."""
    return distribution.lower().replace("_", "-").split("-")[-1] == module


def _end(process):
    """Ends a process that was started with `start_new_session`, and its children."""
    if process.poll() is None:
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.wait()
    process.stderr.close()
