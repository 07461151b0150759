//! Sums by key, of pairs that Python gives: what `combine=operator.add` does in map tasks, without an object of Python for each
//! sum.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyInt, PyIterator, PyList, PyString, PyTuple};
use std::collections::HashMap;

/// Some milliseconds, as Python itself has one thread run (`sys.getswitchinterval`).
const PAIRS_OF_A_CALL: usize = 1 << 15;

/// Of keys that are texts or bytes, and of whole numbers of 64 bits; exactly of these types.
#[pyclass]
#[derive(Default)]
pub struct Sums {
    texts: HashMap<Box<str>, i64>,
    bytes: HashMap<Box<[u8]>, i64>,
    key_bytes: usize,
}

#[pymethods]
impl Sums {
    #[new]
    fn new() -> Sums {
        Sums::default()
    }

    /// Adds pairs until there are no more, or so many keys or bytes of keys are here, or so many pairs are not for here; and of one
    /// call not too many: an iterator that is no Python code gives no other thread its turn.
    ///
    /// Gives whether there are no more; whether the keys are too many; and what is not for here, in its order.
    fn add<'py>(
        &mut self,
        py: Python<'py>,
        pairs: &Bound<'py, PyIterator>,
        keys_max: usize,
        bytes_max: usize,
        others_max: usize,
    ) -> PyResult<(bool, bool, Bound<'py, PyList>)> {
        let others = PyList::empty(py);
        let mut pairs = pairs.clone();
        for _ in 0..PAIRS_OF_A_CALL {
            if self.is_full(keys_max, bytes_max) || others.len() >= others_max {
                break;
            }
            let Some(pair) = pairs.next() else { return Ok((true, false, others)) };
            let pair = pair?;
            if !self.add_one(&pair) {
                others.append(pair)?;
            }
        }
        Ok((false, self.is_full(keys_max, bytes_max), others))
    }

    /// Gives all keys with their sums, and forgets them.
    fn take<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let taken = std::mem::take(self);
        let all = PyList::empty(py);
        for (key, sum) in taken.texts {
            all.append((PyString::new(py, &key), sum))?;
        }
        for (key, sum) in taken.bytes {
            all.append((PyBytes::new(py, &key), sum))?;
        }
        Ok(all)
    }

    fn __len__(&self) -> usize {
        self.len()
    }
}

impl Sums {
    fn len(&self) -> usize {
        self.texts.len() + self.bytes.len()
    }

    fn is_full(&self, keys_max: usize, bytes_max: usize) -> bool {
        self.len() >= keys_max || self.key_bytes >= bytes_max
    }

    /// Whether it was added: nothing else changes it, so that Python may do the same with the others.
    fn add_one(&mut self, pair: &Bound<'_, PyAny>) -> bool {
        let Ok(pair) = pair.cast_exact::<PyTuple>() else { return false };
        if pair.len() != 2 {
            return false;
        }
        let (Ok(key), Ok(value)) = (pair.get_borrowed_item(0), pair.get_borrowed_item(1)) else { return false };
        let Some(value) = value.cast_exact::<PyInt>().ok().and_then(|value| value.extract::<i64>().ok()) else {
            return false;
        };
        if let Ok(text) = key.cast_exact::<PyString>() {
            // Half of a character is no UTF-8.
            text.to_str().is_ok_and(|text| add_to(&mut self.texts, text, value, &mut self.key_bytes))
        } else if let Ok(bytes) = key.cast_exact::<PyBytes>() {
            add_to(&mut self.bytes, bytes.as_bytes(), value, &mut self.key_bytes)
        } else {
            false
        }
    }
}

/// Whether it was added: a sum that is too large is left as it was.
fn add_to<K: ?Sized + std::hash::Hash + Eq>(
    sums: &mut HashMap<Box<K>, i64>,
    key: &K,
    value: i64,
    key_bytes: &mut usize,
) -> bool
where
    Box<K>: for<'a> From<&'a K>,
{
    match sums.get_mut(key) {
        Some(sum) => sum.checked_add(value).map(|more| *sum = more).is_some(),
        None => {
            *key_bytes += size_of_val(key);
            sums.insert(key.into(), value);
            true
        }
    }
}
