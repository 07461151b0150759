//! Memory of the data plane as Python buffers: numpy and Arrow use it without a copy.

use mission_transport::{parts, segment};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::ops::Deref;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// The memory of all segments that Python code may write to: its start, its end, and the calls that use it.
static SEGMENTS: Mutex<BTreeMap<usize, (usize, Arc<Users>)>> = Mutex::new(BTreeMap::new());

/// Calls of this module that read a segment's memory, or -1 for one that writes to it.
#[derive(Default)]
struct Users(AtomicI32);

/// Memory that a task writes its parts into before it puts them.
#[pyclass(frozen)]
pub struct Segment {
    pub inner: Arc<segment::Segment>,
    users: Arc<Users>,
}

/// The right to write to a segment, for one call at a time.
pub struct Exclusive<'a> {
    segment: &'a Segment,
}

/// Memory that a call reads, and that no other call writes to meanwhile; by default none.
#[derive(Default)]
pub struct Bytes<'a> {
    bytes: &'a [u8],
    /// Of the segment in which it lies, if it does.
    users: Option<Arc<Users>>,
}

fn segments() -> MutexGuard<'static, BTreeMap<usize, (usize, Arc<Users>)>> {
    SEGMENTS.lock().expect("no panic while held")
}

impl Segment {
    pub fn new(segment: segment::Segment) -> Segment {
        Segment::of(Arc::new(segment))
    }

    /// Received memory: no other user is left.
    pub fn of(segment: Arc<segment::Segment>) -> Segment {
        segment.add_writer();
        let (start, users) = (segment.as_ptr() as usize, Arc::<Users>::default());
        if !segment.is_empty() {
            segments().insert(start, (start + segment.len(), users.clone()));
        }
        Segment { inner: segment, users }
    }

    /// For a call that writes to all of it, and reads `inputs`.
    ///
    /// # Errors
    /// It was put, another call uses it, or an input lies in it.
    pub fn exclusive(&self, inputs: &[Bytes<'_>]) -> PyResult<Exclusive<'_>> {
        let own = self.inner.as_ptr() as usize..self.inner.as_ptr() as usize + self.inner.len();
        let overlaps = |input: &Bytes<'_>| {
            let start = input.as_ptr() as usize;
            !input.is_empty() && start < own.end && own.start < start + input.len()
        };
        if inputs.iter().any(overlaps) {
            return Err(crate::bad_input("an input lies in the output: allocate another segment for the output"));
        }
        if Arc::strong_count(&self.inner) > 1 {
            return Err(crate::bad_input("the output was put already: allocate another segment"));
        }
        if self.users.0.compare_exchange(0, -1, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return Err(crate::bad_input("another call uses the output: allocate a segment for each call"));
        }
        Ok(Exclusive { segment: self })
    }

    /// For a call that reads all of it, or makes an object of it.
    ///
    /// # Errors
    /// Another call writes to it.
    pub fn read(&self) -> PyResult<Bytes<'_>> {
        // SAFETY: it lives as long as `self`; while the result exists, no call of this module writes to it.
        Bytes::of(unsafe { std::slice::from_raw_parts(self.inner.as_ptr(), self.inner.len()) })
    }
}

impl Exclusive<'_> {
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let inner = &self.segment.inner;
        // SAFETY: no other call of this module writes or reads it, and no input lies in it; Python code must not use
        // views of it during the call, as the functions that take a segment document.
        unsafe { std::slice::from_raw_parts_mut(inner.as_ptr(), inner.len()) }
    }
}

impl Drop for Exclusive<'_> {
    fn drop(&mut self) {
        self.segment.users.0.store(0, Ordering::Release);
    }
}

impl<'a> Bytes<'a> {
    fn of(bytes: &'a [u8]) -> PyResult<Bytes<'a>> {
        let start = bytes.as_ptr() as usize;
        let users = {
            let segments = segments();
            let before = segments.range(..=start).next_back();
            before.filter(|(_, (end, _))| start < *end && !bytes.is_empty()).map(|(_, (_, users))| users.clone())
        };
        if let Some(users) = &users {
            let another = |count| if count < 0 { None } else { Some(count + 1) };
            if users.0.fetch_update(Ordering::Acquire, Ordering::Relaxed, another).is_err() {
                return Err(crate::bad_input("another call writes to this segment: wait for it to end"));
            }
        }
        Ok(Bytes { bytes, users })
    }
}

impl Deref for Bytes<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes
    }
}

impl Drop for Bytes<'_> {
    fn drop(&mut self) {
        if let Some(users) = &self.users {
            users.0.fetch_sub(1, Ordering::Release);
        }
    }
}

impl Drop for Segment {
    /// Views hold this object: once it is gone nobody writes to its memory any more, and it can be shared.
    fn drop(&mut self) {
        if !self.inner.is_empty() {
            segments().remove(&(self.inner.as_ptr() as usize));
        }
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

    /// Where it lies in memory that other processes can map: a descriptor, and where it begins there.
    fn place(&self) -> Option<(i32, u64)> {
        self.inner.place().map(|(file, start)| (file.as_raw_fd(), start))
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
    // SAFETY: guaranteed by the caller.
    let status = unsafe {
        ffi::PyBuffer_FillInfo(view, owner.as_ptr(), start.cast(), len as ffi::Py_ssize_t, c_int::from(readonly), flags)
    };
    if status == 0 { Ok(()) } else { Err(PyErr::fetch(owner.py())) }
}

/// The bytes of a contiguous buffer.
///
/// # Safety
/// The result must not outlive `buffer`, and Python code may not write to it meanwhile: `put` and the record functions
/// document that.
///
/// # Errors
/// It is not contiguous, or another call of this module writes to it.
pub unsafe fn bytes_of(buffer: &pyo3::buffer::PyBuffer<u8>) -> PyResult<Bytes<'_>> {
    if !buffer.is_c_contiguous() {
        return Err(crate::bad_input("the buffer is not contiguous: copy it first, as numpy.ascontiguousarray does"));
    }
    if buffer.len_bytes() == 0 {
        return Bytes::of(&[]);
    }
    // SAFETY: a contiguous buffer of that many bytes, held by `buffer`.
    Bytes::of(unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast(), buffer.len_bytes()) })
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
