//! Memory of the data plane as Python buffers: numpy and Arrow use it without a copy.

use mission_transport::{parts, segment};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Memory that a task writes its parts into before it puts them.
#[pyclass(frozen)]
pub struct Segment {
    pub inner: Arc<segment::Segment>,
    /// A call of this module writes to it now.
    busy: AtomicBool,
}

/// The right to write to a segment, for one call at a time.
pub struct Exclusive<'a> {
    segment: &'a Segment,
}

impl Segment {
    pub fn new(segment: segment::Segment) -> Segment {
        segment.add_writer();
        Segment { inner: Arc::new(segment), busy: AtomicBool::new(false) }
    }

    /// For a call that writes to all of it, and reads `inputs`.
    ///
    /// # Errors
    /// It was put, another call writes to it, or an input lies in it.
    pub fn exclusive(&self, inputs: &[&[u8]]) -> PyResult<Exclusive<'_>> {
        let own = self.inner.as_ptr() as usize..self.inner.as_ptr() as usize + self.inner.len();
        let overlaps = |input: &&[u8]| {
            let start = input.as_ptr() as usize;
            !input.is_empty() && start < own.end && own.start < start + input.len()
        };
        if inputs.iter().any(overlaps) {
            return Err(crate::bad_input("an input lies in the output: allocate another segment for the output"));
        }
        if Arc::strong_count(&self.inner) > 1 {
            return Err(crate::bad_input("the output was put already: allocate another segment"));
        }
        if self.busy.swap(true, Ordering::Acquire) {
            return Err(crate::bad_input("another call writes to the output: allocate a segment for each call"));
        }
        Ok(Exclusive { segment: self })
    }
}

impl Exclusive<'_> {
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let inner = &self.segment.inner;
        // SAFETY: nobody else of this module writes or reads it, and no input lies in it; views that Python code made of it
        // are not to be used during the call, as callers are told by the functions that take a segment.
        unsafe { std::slice::from_raw_parts_mut(inner.as_ptr(), inner.len()) }
    }
}

impl Drop for Exclusive<'_> {
    fn drop(&mut self) {
        self.segment.busy.store(false, Ordering::Release);
    }
}

impl Drop for Segment {
    /// Views hold this object: once it is gone nobody writes to its memory any more, and it can be shared.
    fn drop(&mut self) {
        self.inner.writer_gone();
    }
}

#[pymethods]
impl Segment {
    fn __len__(&self) -> usize {
        self.inner.len()
    }

    // SAFETY: called by Python with a view to be filled; the memory lives as long as `slf`, which the view holds.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let inner = &slf.get().inner;
        // SAFETY: as this function's own.
        unsafe { fill(&slf.clone().into_any(), view, inner.as_ptr(), inner.len(), false, flags) }
    }
}

/// A part that has arrived: read-only.
#[pyclass(frozen)]
pub struct Part {
    pub inner: parts::Part,
}

#[pymethods]
impl Part {
    fn __len__(&self) -> usize {
        self.inner.bytes().len()
    }

    // SAFETY: as for Segment.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let bytes = slf.get().inner.bytes();
        // SAFETY: as this function's own; nobody writes to a read-only view.
        unsafe { fill(&slf.clone().into_any(), view, bytes.as_ptr().cast_mut(), bytes.len(), true, flags) }
    }
}

/// # Safety
/// `view` comes from Python; `start` and `len` are memory that lives as long as `owner`.
unsafe fn fill(
    owner: &Bound<'_, PyAny>,
    view: *mut ffi::Py_buffer,
    start: *mut u8,
    len: usize,
    readonly: bool,
    flags: c_int,
) -> PyResult<()> {
    if view.is_null() {
        return Err(PyBufferError::new_err("no view to fill"));
    }
    // SAFETY: as promised by the caller.
    let status = unsafe {
        ffi::PyBuffer_FillInfo(view, owner.as_ptr(), start.cast(), len as ffi::Py_ssize_t, c_int::from(readonly), flags)
    };
    if status == 0 { Ok(()) } else { Err(PyErr::fetch(owner.py())) }
}

/// The bytes of a contiguous buffer.
///
/// # Safety
/// The slice must not outlive `buffer`, and nobody may write to it meanwhile: callers of `put` and of the record
/// functions are told so.
pub unsafe fn bytes_of(buffer: &pyo3::buffer::PyBuffer<u8>) -> PyResult<&[u8]> {
    if !buffer.is_c_contiguous() {
        return Err(crate::bad_input("the buffer is not contiguous: copy it first, as numpy.ascontiguousarray does"));
    }
    if buffer.len_bytes() == 0 {
        return Ok(&[]);
    }
    // SAFETY: a contiguous buffer of that many bytes, held by `buffer`.
    Ok(unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast(), buffer.len_bytes()) })
}

/// A buffer of bytes of any object that has one, whatever its items are.
pub fn buffer_of(object: &Bound<'_, PyAny>) -> PyResult<pyo3::buffer::PyBuffer<u8>> {
    if let Ok(buffer) = pyo3::buffer::PyBuffer::<u8>::get(object) {
        return Ok(buffer);
    }
    let view = object.py().import("builtins")?.getattr("memoryview")?.call1((object,))?;
    if view.getattr("nbytes")?.extract::<usize>()? == 0 {
        // Python casts no view without items.
        return pyo3::buffer::PyBuffer::<u8>::get(&pyo3::types::PyBytes::new(object.py(), b""));
    }
    pyo3::buffer::PyBuffer::<u8>::get(&view.call_method1("cast", ("B",))?)
}
