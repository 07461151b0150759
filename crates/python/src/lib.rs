//! `mission_control._native`: the seam between Python and the decisions and data plane in Rust.
//!
//! Frequent data (bytes) crosses as buffers; infrequent data (events, commands, status) as JSON. No Python lock
//! is held while bytes move. The Python side of every name is described in `mission_control/_native.pyi`.

mod columns;
mod control;
mod decisions;
mod endpoint;
mod incast;
#[cfg(feature = "kernel")]
mod kernel;
mod lanes;
mod memory;
mod records;
mod references;
mod service;
mod stream;
mod sums;
mod threads;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind};

#[pymodule]
mod _native {
    #[pymodule_export]
    use super::_panic;
    #[pymodule_export]
    use super::columns::{ColumnSplit, columns_hash, columns_ranges, rows_sort};
    #[pymodule_export]
    use super::control::Controller;
    #[pymodule_export]
    use super::decisions::{
        check_priority, contradiction, defaults, format_bytes, parse_bytes, parse_duration, parse_rate, policies,
        seconds_per_grant, transports, weights,
    };
    #[pymodule_export]
    use super::endpoint::{
        Cancelled, Damaged, Denied, Endpoint, Lost, StreamFailed, TransferError, Unreachable, carriers, link_rate,
    };
    #[pymodule_export]
    use super::incast::{IncastServer, incast_advise, incast_measure, incast_predict};
    #[cfg(feature = "kernel")]
    #[pymodule_export]
    use super::kernel::{Dctcp, Delays, Setter, Switch, bond_pairs, checksums_off, mptcp_preload};
    #[pymodule_export]
    use super::lanes::Lanes;
    #[pymodule_export]
    use super::memory::{Part, Segment};
    #[pymodule_export]
    use super::records::{records_check, records_partition};
    #[pymodule_export]
    use super::references::Finder;
    #[pymodule_export]
    use super::service::Service;
    #[pymodule_export]
    use super::stream::{StreamPrefix, StreamReader, StreamWriter};
    #[pymodule_export]
    use super::sums::Sums;
    #[pymodule_export]
    use super::threads::Threads;
    #[pymodule_export]
    use pyo3::panic::PanicException;

    #[pymodule_export]
    const FLOWS_PER_HOST: u32 = mission_core::defaults::FLOWS_PER_HOST;
    #[pymodule_export]
    const PROTOCOL: u32 = mission_core::control::PROTOCOL;
    #[pymodule_export]
    const BEGINS_AGAIN_MAX: u32 = mission_core::control::BEGINS_AGAIN_MAX;
    #[pymodule_export]
    const REPORT_EVERY_MS: u128 = mission_core::defaults::REPORT_EVERY.as_millis();
    #[pymodule_export]
    const STORE_MEMORY_FRACTION: f64 = mission_core::defaults::STORE_MEMORY_FRACTION;
}

/// Runs without Python's lock. A panic becomes an error of Python's own: PyO3's is none that another process could
/// unpickle, and the client of a task that raised it would wait for ever.
fn detached<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> PyResult<T> {
    py.detach(|| guarded(work))
}

/// As [`detached`], for what is too short to give the lock away.
fn guarded<T>(work: impl FnOnce() -> T) -> PyResult<T> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        let text = text.unwrap_or("without a message");
        PyRuntimeError::new_err(format!("a bug of Mission Control, please report it: {text}"))
    })
}

/// For the test that a panic is an error.
#[pyfunction]
fn _panic(py: Python<'_>, text: String) -> PyResult<()> {
    detached(py, || panic!("{text}"))
}

fn bad_input(error: impl std::fmt::Display) -> PyErr {
    pyo3::exceptions::PyValueError::new_err(error.to_string())
}
