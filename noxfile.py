#!/usr/bin/env -S uv run --script
# /// script
# dependencies = ["nox[uv]>=2026.4"]
# ///
"""Every check of the workspace: `nox` runs what CI runs, `nox -l` lists all with one line each."""

from pathlib import Path

import nox

nox.needs_version = ">=2026.4"
nox.options.default_venv_backend = "uv"

ROOT = Path(__file__).parent
KERNEL = "packages/flash-kernel"
LLM = "packages/tiny-llm"
BENCH = "packages/attn-bench"
PARALLEL = "--numprocesses=auto"
# documents beside the README that show result files
RESULT_DOCS = ("docs/results.md", "docs/benchmarking.md")
# a file to a process: what its tests share, such as two trained processes, is made once
BY_FILE = (PARALLEL, "--dist=loadfile")
# left to compile-kernel, which runs it with two versions of Triton
NOT_COMPILE_ONLY = f"--ignore-glob={ROOT / KERNEL}/tests/test_compile_only*.py"
# what simulates kernels line by line, or takes long, tests-kernel has run on the same source
NOT_SIMULATED = f"--ignore-glob={ROOT / KERNEL}/tests/test_hopper_*protocol.py"


def sync(session: nox.Session, *args: str) -> None:
    """Install exactly what uv.lock says into the session's own environment."""
    session.run_install(
        "uv",
        "sync",
        "--locked",
        "--no-default-groups",
        f"--python={session.virtualenv.location}",
        *args,
        env={"UV_PROJECT_ENVIRONMENT": session.virtualenv.location},
    )


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting with ruff."""
    sync(session, "--only-group=lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def typecheck(session: nox.Session) -> None:
    """Check types with mypy in strict mode."""
    sync(session, "--all-packages", "--all-extras", "--group=typing", "--all-groups")
    session.run("mypy", f"{KERNEL}/src", f"{LLM}/src", f"{BENCH}/src")


@nox.session(name="tests-kernel")
def tests_kernel(session: nox.Session) -> None:
    """Test flash-kernel with nothing of the other packages installed."""
    sync(session, "--package=flash-kernel", "--group=test")
    session.run(
        "pytest",
        KERNEL,
        NOT_COMPILE_ONLY,
        PARALLEL,
        "--dist=worksteal",  # compiling a kernel takes long, most tests do not
        *session.posargs,
        env={"FLASH_KERNEL_ISOLATED": "1"},
    )


@nox.session(name="tests-llm")
@nox.parametrize("extra", ["none", "flash"])
def tests_llm(session: nox.Session, extra: str) -> None:
    """Test tiny-llm without and with its optional extra `flash`."""
    extras = [] if extra == "none" else [f"--extra={extra}"]
    sync(session, "--package=tiny-llm", "--group=test", *extras)
    # what starts processes takes long and knows nothing of the extra: once is enough
    once = ["-m", "not slow"] if extra == "none" else []
    session.run("pytest", LLM, *BY_FILE, *once, *session.posargs, env={"TINY_LLM_EXTRA": extra})


@nox.session(name="tests-bench")
def tests_bench(session: nox.Session) -> None:
    """Test attn-bench, its smoke preset, documents' examples, and README tables against results."""
    sync(session, "--package=attn-bench", "--group=test")
    session.run("pytest", BENCH, *BY_FILE, *session.posargs)
    session.run("attn-bench", "flash", "--preset=smoke", "--device=cpu", "--milliseconds=10")
    session.run("pytest", "--doctest-glob=*.md", "README.md", "docs")
    session.run("attn-bench", "docs", "README.md", *RESULT_DOCS, "--check")


@nox.session(name="wheel-kernel")
def wheel_kernel(session: nox.Session) -> None:
    """Build flash-kernel's wheel, install only that, and run its tests against it."""
    dist = Path(session.create_tmp()).resolve() / "dist"
    session.run(
        "uv", "build", "--package=flash-kernel", "--clear", f"--out-dir={dist}", external=True
    )
    (wheel,) = dist.glob("*.whl")
    pins = dist / "pins.txt"
    session.run(
        "uv",
        "export",
        "--locked",
        "--quiet",
        "--package=flash-kernel",
        "--group=test",
        "--no-default-groups",
        "--no-emit-workspace",
        "--no-hashes",
        "-o",
        str(pins),
        external=True,
        silent=True,
    )
    session.install(str(wheel), "-r", str(pins))
    with session.chdir(dist):
        session.run(
            "pytest",
            str(ROOT / KERNEL / "tests"),
            NOT_COMPILE_ONLY,
            NOT_SIMULATED,
            "-m",
            "not slow",
            PARALLEL,
            "-c",
            str(ROOT / "pyproject.toml"),
            f"--rootdir={dist}",
            "-p",
            "no:cacheprovider",
            *session.posargs,
            env={"FLASH_KERNEL_ISOLATED": "1"},
        )


@nox.session(name="compile-kernel")
@nox.parametrize("triton", ["3.6.0", "3.9.0"])
def compile_kernel(session: nox.Session, triton: str) -> None:
    """Compile the kernels by the oldest and the newest Triton, with no GPU."""
    sync(session, "--package=flash-kernel", "--group=test")
    # only Triton is exchanged: the compile-only tests never launch, so torch's own pin is moot
    # (conftest.py sets up Triton's interpreter, and that of 3.6 fails with numpy 2.4)
    session.install("--no-deps", f"triton=={triton}", "numpy<2.4")
    tests = ["compile_only", "compile_only_hopper_forward", "compile_only_hopper_backward"]
    session.run(
        "pytest",
        *(f"{KERNEL}/tests/test_{name}.py" for name in tests),
        PARALLEL,
        "--dist=worksteal",  # compiling a kernel takes long, most tests do not
        *session.posargs,
        env={"FLASH_KERNEL_EXPECT_TRITON": triton},
    )


@nox.session(name="lowest-kernel", default=False)
def lowest_kernel(session: nox.Session) -> None:
    """Test flash-kernel on the oldest torch and Triton it allows (downloads several GB)."""
    session.install(
        "--resolution=lowest-direct", f"./{KERNEL}", "--group", f"{KERNEL}/pyproject.toml:test"
    )
    session.run("pytest", KERNEL, PARALLEL, *session.posargs)


@nox.session(default=False)
def gpu(session: nox.Session) -> None:
    """Run every package's tests on this machine's GPU."""
    sync(session, "--all-packages", "--all-extras", "--group=test")
    session.run(
        "pytest",
        *(KERNEL, LLM, BENCH),
        PARALLEL,
        "--dist=worksteal",  # compiling a kernel takes long, most tests do not
        *session.posargs,
        env={"FLASH_KERNEL_EXPECT_GPU": "1"},
    )
