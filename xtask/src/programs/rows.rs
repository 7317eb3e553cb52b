//! The programs, and how each is run.

use super::venv::Venv;
use super::work::{Run, Work};
use anyhow::Result;

/// A program of the page.
pub(super) struct Row {
    pub name: &'static str,
    /// For readers.
    pub what: &'static str,
    pub venv: Venv,
    /// Whether it runs with `--quick`.
    pub quick: bool,
    pub kind: Kind,
    /// What py-spy is asked for, and which of this profiler's samples it is compared with.
    pub compared: Compared,
}

/// How a row is measured.
pub(super) enum Kind {
    /// It is started, and profiled by its process id once it has warmed up.
    Steady { start: fn(&mut Work<'_>) -> Result<u32>, children: bool },
    /// It is started by the profiler, several times.
    Short(&'static [&'static str]),
}

/// Which threads' samples are compared.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Compared {
    /// Threads that hold the GIL: `py-spy --gil`.
    Gil,
    /// Running threads.
    Running,
}

const fn library(name: &'static str, what: &'static str, start: fn(&mut Work<'_>) -> Result<u32>) -> Row {
    let kind = Kind::Steady { start, children: false };
    Row { name, what, venv: Venv::Libraries, quick: false, kind, compared: Compared::Running }
}

const fn service(name: &'static str, what: &'static str, start: fn(&mut Work<'_>) -> Result<u32>) -> Row {
    let kind = Kind::Steady { start, children: true };
    Row { name, what, venv: Venv::Services, quick: false, kind, compared: Compared::Gil }
}

const fn short(name: &'static str, what: &'static str, venv: Venv, words: &'static [&'static str]) -> Row {
    Row { name, what, venv, quick: false, kind: Kind::Short(words), compared: Compared::Running }
}

/// The same row, included in `--quick`, which only uses small packages.
const fn quick(row: Row) -> Row {
    Row { quick: true, venv: Venv::Small, ..row }
}

/// The same row, compared by threads that hold the GIL.
const fn holders(row: Row) -> Row {
    Row { compared: Compared::Gil, ..row }
}

/// All of them, in the page's order.
pub(super) const ROWS: &[Row] = &[
    quick(service("gunicorn", "sync workers, two of them, WSGI", |work| {
        gunicorn(work, &["--workers", "2", "shop:wsgi"])
    })),
    service("gthread", "gunicorn with two workers of four threads", |work| {
        gunicorn(work, &["--workers", "2", "--threads", "4", "shop:wsgi"])
    }),
    service("gevent", "gunicorn with gevent workers", |work| {
        gunicorn(work, &["--workers", "2", "--worker-class", "gevent", "shop:wsgi"])
    }),
    quick(service("pywsgi", "gevent's own server, and greenlets that come and go", |work| {
        work.served(|port| Run::script("green.py").args([port]))
    })),
    service("uvicorn", "uvloop and httptools, plain ASGI", |work| {
        work.served(|port| Run::module("uvicorn").args(["--port", port, "--log-level", "error", "shop:asgi"]))
    }),
    service("fastapi", "uvicorn, FastAPI and pydantic", |work| {
        work.served(|port| Run::module("uvicorn").args(["--port", port, "--log-level", "error", "fast:app"]))
    }),
    service("django", "models in SQLite, templates and middleware, in gunicorn", |work| {
        work.run_to_its_end(&Run::script("pages.py").args(["fill"]))?;
        gunicorn(work, &["--workers", "2", "pages:application"])
    }),
    service("celery", "prefork workers, two of them", |work| {
        let worker = Run::module("celery").args(["-A", "jobs_celery", "worker", "--concurrency", "2"]);
        let worker = work.start(&worker.args(["--loglevel", "ERROR"]))?;
        work.start(&Run::script("jobs_celery.py"))?;
        work.settle();
        Ok(worker)
    }),
    service("dramatiq", "a worker of four threads", |work| work.ready(&Run::script("jobs_dramatiq.py"))),
    service(
        "airflow",
        "scheduler, processor of DAGs, triggerer and API server (`standalone`, with its examples)",
        |work| {
            let all = work.start(&Run::module("airflow").args(["standalone"]))?;
            work.settle_for(90);
            Ok(all)
        },
    ),
    service("dask", "a scheduler and two workers", |work| work.ready(&Run::script("graph.py"))),
    service("ipykernel", "a kernel of Jupyter that runs cells", |work| {
        work.ready(&Run::script("notebook.py"))?;
        work.told_pid()
    }),
    library("numpy", "array arithmetic, sorting, FFT, a matrix product", |work| with(work, "numpy")),
    library("pandas", "a join, groups, strings", |work| with(work, "pandas")),
    library("scikit-learn", "a forest and a regression", |work| with(work, "sklearn")),
    library("torch", "training a small network; its CUDA libraries are mapped", |work| with(work, "torch")),
    library("jax", "compiled, differentiated and eager functions", |work| with(work, "jax")),
    library("numba", "a compiled loop", |work| with(work, "numba")),
    // While its threads work, the one that waits for them runs on and off.
    holders(library("polars", "a lazy query, rows", |work| with(work, "polars"))),
    library("pyarrow", "Parquet in memory, groups, sorting", |work| with(work, "pyarrow")),
    quick(library("lxml", "parsing HTML, XPath, XSLT", |work| with(work, "lxml"))),
    quick(library("pydantic", "validating and dumping models", |work| with(work, "pydantic"))),
    library("everything", "torch with CUDA, jax, pyarrow, pandas, scikit-learn and polars in one process", |work| {
        with(work, "everything")
    }),
    quick(short("pytest", "190 small tests", Venv::Small, &["-m", "pytest", "-q", "-p", "no:cacheprovider", "suite"])),
    quick(short("pip", "`pip list`", Venv::Small, &["-m", "pip", "list"])),
    short("import pandas", "imports it and ends", Venv::Libraries, &["-c", "import pandas"]),
    short("import torch", "imports it and ends", Venv::Libraries, &["-c", "import torch"]),
    short("django check", "sets a site up and ends", Venv::Services, &["pages.py"]),
];

fn gunicorn(work: &mut Work<'_>, words: &[&str]) -> Result<u32> {
    work.served(|port| Run::module("gunicorn").args(["--bind", &format!("127.0.0.1:{port}")]).args(words))
}

fn with(work: &mut Work<'_>, library: &str) -> Result<u32> {
    work.ready(&Run::script("libraries.py").args([library]))
}
