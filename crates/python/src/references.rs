//! Finds the references that a value of Python holds, as the garbage collector walks it: no code of Python runs.
//!
//! To pickle a value finds them, too, but costs as much as the value took to make, and calls methods of the program's own classes.

use pyo3::buffer::PyUntypedBuffer;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::PyType;
use std::collections::{HashMap, HashSet};
use std::ffi::{c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// How many types are kept, of programs that make ever new ones.
const TYPES_MAX: usize = 4096;
/// How often the walk of one value begins again: objects of types that are not known yet are not entered, and may hold
/// others. A class in a class in a class takes three.
const WALKS_MAX: usize = 16;
/// How many types one value may have that are not known yet; a program that makes more has its results pickled.
const NEW_TYPES_MAX: usize = 1024;

/// What objects of a type hold.
#[derive(Clone, Copy)]
enum Kind {
    /// Nothing.
    Plain,
    /// It is a reference.
    Reference,
    /// What the garbage collector knows.
    Walked(Traverse),
    /// An array of NumPy, which the garbage collector does not know.
    Array(Option<Traverse>),
    /// Nobody can tell.
    Unknown,
}

type Traverse = unsafe extern "C" fn(*mut ffi::PyObject, ffi::visitproc, *mut c_void) -> c_int;

/// A walk met types that nobody knows yet; each stands here once.
struct New<'py>(Vec<Bound<'py, PyType>>);

/// Finds references. What it has learnt of types serves later searches.
#[pyclass(frozen)]
pub struct Finder {
    kind_of: Py<PyAny>,
    kinds: Mutex<Kinds>,
}

/// By the address of a type, which is kept.
type Kinds = HashMap<*mut ffi::PyObject, (Py<PyType>, Kind)>;

// SAFETY: addresses are only compared, and used while the types are kept.
unsafe impl Send for Finder {}
// SAFETY: as above.
unsafe impl Sync for Finder {}

#[pymethods]
impl Finder {
    /// `kind_of` returns for a type `"plain"`, `"reference"`, `"walked"`, `"array"` or `"unknown"`.
    #[new]
    fn new(kind_of: Py<PyAny>) -> Finder {
        Finder { kind_of, kinds: Mutex::default() }
    }

    /// Returns the references that a value holds; `None`: nobody can tell without pickling it.
    fn find<'py>(&self, value: &Bound<'py, PyAny>) -> PyResult<Option<Vec<Bound<'py, PyAny>>>> {
        let py = value.py();
        let mut met = 0;
        for _ in 0..WALKS_MAX {
            let New(mut types) = match walk_all(value, &self.kinds(py)) {
                Ok(found) => return Ok(found),
                Err(new) => new,
            };
            // Those that are learnt now serve the next search.
            types.truncate(NEW_TYPES_MAX - met);
            met += types.len();
            // Another thread may run in there, and change the value: the walk begins again.
            let mut learnt = Vec::with_capacity(types.len());
            for own in types {
                let named: String = self.kind_of.bind(py).call1((&own,))?.extract()?;
                learnt.push((own.as_ptr(), (own.clone().unbind(), kind(&own, &named))));
            }
            let mut kinds = self.kinds(py);
            let is_full = kinds.len() + learnt.len() > TYPES_MAX;
            let forgotten = if is_full { std::mem::take(&mut *kinds) } else { Kinds::new() };
            let replaced: Vec<_> = learnt.into_iter().filter_map(|(at, known)| kinds.insert(at, known)).collect();
            drop(kinds);
            // Code of Python may run where a type ends.
            drop((forgotten, replaced));
            if met == NEW_TYPES_MAX {
                break;
            }
        }
        Ok(None)
    }
}

impl Finder {
    /// Does not wait with Python's lock.
    fn kinds(&self, py: Python<'_>) -> MutexGuard<'_, Kinds> {
        self.kinds.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner)
    }
}

type Found<'py> = Option<Vec<Bound<'py, PyAny>>>;

/// Runs no code of Python, so nothing that it has met is freed meanwhile.
fn walk_all<'py>(value: &Bound<'py, PyAny>, kinds: &Kinds) -> Result<Found<'py>, New<'py>> {
    let py = value.py();
    let (mut seen, mut found, mut pending) = (HashSet::new(), Vec::new(), vec![value.as_ptr()]);
    let mut new: HashMap<_, Bound<'py, PyType>> = HashMap::new();
    while let Some(object) = pending.pop() {
        // SAFETY: `value` keeps all that is met, as long as this thread has Python's lock.
        let is_type = unsafe { ffi::PyType_Check(object) } != 0;
        // SAFETY: as above.
        let of = if is_type { object } else { unsafe { ffi::Py_TYPE(object) }.cast() };
        let Some((_, kind)) = kinds.get(&of) else {
            // SAFETY: as above; an object keeps its type.
            new.entry(of).or_insert_with(|| unsafe { PyType::from_borrowed_type_ptr(py, of.cast()) });
            continue;
        };
        match kind {
            Kind::Unknown => return Ok(None),
            // A class holds nothing itself: those that are pickled by value are unknown.
            Kind::Plain => continue,
            _ if is_type || !seen.insert(object) => continue,
            // SAFETY: as above.
            Kind::Reference => found.push(unsafe { Bound::from_borrowed_ptr(py, object) }),
            Kind::Walked(traverse) => walk(object, *traverse, &mut pending),
            Kind::Array(traverse) => {
                if let Some(traverse) = traverse {
                    walk(object, *traverse, &mut pending);
                }
                // SAFETY: as above.
                let array = unsafe { Bound::from_borrowed_ptr(py, object) };
                if !items(&array, &mut pending) {
                    return Ok(None);
                }
            }
        }
    }
    if new.is_empty() { Ok(Some(found)) } else { Err(New(new.into_values().collect())) }
}

fn kind(own: &Bound<'_, PyType>, named: &str) -> Kind {
    // SAFETY: it is a type.
    let slot = unsafe { ffi::PyType_GetSlot(own.as_type_ptr(), ffi::Py_tp_traverse) };
    // SAFETY: a slot is what its name says.
    let traverse = (!slot.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, Traverse>(slot) });
    match (named, traverse) {
        ("plain", _) => Kind::Plain,
        ("reference", _) => Kind::Reference,
        ("array", _) => Kind::Array(traverse),
        ("walked", Some(traverse)) => Kind::Walked(traverse),
        _ => Kind::Unknown,
    }
}

fn walk(object: *mut ffi::PyObject, traverse: Traverse, pending: &mut Vec<*mut ffi::PyObject>) {
    unsafe extern "C" fn visit(object: *mut ffi::PyObject, pending: *mut c_void) -> c_int {
        // SAFETY: it is the one that is given below.
        unsafe { (*pending.cast::<Vec<*mut ffi::PyObject>>()).push(object) };
        0
    }
    // SAFETY: the slot of the object's own type.
    unsafe { traverse(object, visit, std::ptr::from_mut(pending).cast()) };
}

/// The items of an array, if they are objects. Returns false if nobody can tell what they hold. NumPy's own code makes the
/// buffer; those of subclasses are unknown if they have code of their own (`kind_of`).
fn items(array: &Bound<'_, PyAny>, pending: &mut Vec<*mut ffi::PyObject>) -> bool {
    // Times, say, have no format of a buffer.
    let Ok(buffer) = PyUntypedBuffer::get(array) else { return false };
    match buffer.format().to_bytes() {
        b"O" => {}
        // Of records, the names of fields may have the letter, too.
        format => return !format.contains(&b'O'),
    }
    let (strides, shape) = (buffer.strides(), buffer.shape());
    let mut index = vec![0usize; shape.len()];
    if shape.contains(&0) {
        return true;
    }
    loop {
        let offset: isize = index.iter().zip(strides).map(|(at, stride)| *at as isize * stride).sum();
        // SAFETY: an item of the buffer, which the array keeps; NumPy stores "no object" as null.
        let item = unsafe { buffer.buf_ptr().byte_offset(offset).cast::<*mut ffi::PyObject>().read_unaligned() };
        if !item.is_null() {
            pending.push(item);
        }
        let Some(axis) = (0..shape.len()).rev().find(|axis| index[*axis] + 1 < shape[*axis]) else { return true };
        index[axis] += 1;
        index[axis + 1..].fill(0);
    }
}
