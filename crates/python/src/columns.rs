//! Rows of data frames, split by output partition and joined again (`mission-columns`), in memory of the data plane.

use crate::endpoint::OfIo;
use crate::memory::{Bytes, Segment, buffer_of, bytes_of};
use crate::{bad_input, detached};
use mission_columns::{Buffer, Column, Kind, Offsets, Split, hash_column, hash_rows, measure, ranges, sort_rows};
use mission_transport::segment::{self, Pool};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use std::ops::Range;
use std::sync::Arc;

/// Buffers of this size have memory of their own, so that code that keeps one column does not keep all. Smaller ones
/// share: a process has 65,530 mappings (`vm.max_map_count`).
const OWN_MEMORY_MIN: usize = 1 << 20;
/// Arrow's recommendation for the start of a buffer (Arrow columnar format, "Buffer Alignment and Padding").
const ALIGNMENT: usize = 64;

#[pyclass(frozen)]
pub struct ColumnSplit {
    split: Split,
    buffers: Vec<Given>,
    sizes: Vec<u64>,
}

/// Kind, number, bytes and offsets, as Python gives them.
type Described<'py> = (String, usize, Option<Bound<'py, PyAny>>, Option<Bound<'py, PyAny>>);

struct Given {
    kind: String,
    number: usize,
    values: Option<PyBuffer<u8>>,
    offsets: Option<PyBuffer<u8>>,
}

impl Given {
    fn new((kind, number, values, offsets): Described<'_>) -> PyResult<Given> {
        let [values, offsets] = [values, offsets].map(|own| own.as_ref().map(buffer_of).transpose());
        Ok(Given { kind, number, values: values?, offsets: offsets? })
    }

    fn bytes(&self) -> PyResult<[Bytes<'_>; 2]> {
        fn bytes(buffer: &Option<PyBuffer<u8>>) -> PyResult<Bytes<'_>> {
            // SAFETY: the caller holds the buffer, and Python code does not write to a frame that it shuffles.
            buffer.as_ref().map_or_else(|| Ok(Bytes::default()), |buffer| unsafe { bytes_of(buffer) })
        }
        Ok([bytes(&self.values)?, bytes(&self.offsets)?])
    }

    fn buffer<'a>(&self, [values, offsets]: &'a [Bytes<'_>; 2]) -> PyResult<Buffer<'a>> {
        let offsets = match self.number {
            4 => Offsets::Narrow(offsets),
            _ => Offsets::Wide(offsets),
        };
        Ok(match self.kind.as_str() {
            "fixed" => Buffer::Fixed { width: self.number, values },
            "bits" => Buffer::Bits { bits: values, start: self.number },
            "all-set" => Buffer::AllSet,
            "variable" => Buffer::Variable { offsets, values },
            other => return Err(bad_input(format!("unknown kind of buffer {other:?}"))),
        })
    }
}

#[pymethods]
impl ColumnSplit {
    #[new]
    fn new(
        py: Python<'_>,
        partitions: PyBuffer<i64>,
        part_of: Vec<u32>,
        parts: usize,
        buffers: Vec<Described<'_>>,
    ) -> PyResult<ColumnSplit> {
        if !partitions.is_c_contiguous() {
            return Err(bad_input("the partitions are not contiguous"));
        }
        let rows: &[i64] = match partitions.item_count() {
            0 => &[],
            // SAFETY: contiguous, of that many items, held by `partitions`; the caller does not write to it meanwhile.
            count => unsafe { std::slice::from_raw_parts(partitions.buf_ptr().cast(), count) },
        };
        let buffers = buffers.into_iter().map(Given::new).collect::<PyResult<Vec<_>>>()?;
        let bytes = buffers.iter().map(Given::bytes).collect::<PyResult<Vec<_>>>()?;
        let views = buffers.iter().zip(&bytes).map(|(own, bytes)| own.buffer(bytes)).collect::<PyResult<Vec<_>>>()?;
        let made = detached(py, || {
            let split = Split::new(rows, &part_of, parts)?;
            let sizes = split.sizes(&views)?;
            Ok::<_, String>((split, sizes))
        })?;
        let (split, sizes) = made.map_err(bad_input)?;
        drop(views);
        drop(bytes);
        Ok(ColumnSplit { split, buffers, sizes })
    }

    #[getter]
    fn sizes(&self) -> Vec<u64> {
        self.sizes.clone()
    }

    #[getter]
    fn rows(&self) -> Vec<usize> {
        self.split.rows().to_vec()
    }

    #[getter]
    fn unwanted(&self) -> u64 {
        self.split.unwanted()
    }

    /// Each output takes as many whole parts as it has bytes for.
    fn write(&self, py: Python<'_>, outs: Vec<PyRef<'_, Segment>>) -> PyResult<()> {
        let mut rest = &self.sizes[..];
        for out in &outs {
            let mut room = out.inner.len() as u64;
            while let Some((size, others)) = rest.split_first().filter(|(size, _)| **size <= room) {
                (room, rest) = (room - size, others);
            }
            if room > 0 {
                return Err(bad_input(format!("an output is {room} bytes longer than its parts")));
            }
        }
        if rest.iter().any(|size| *size > 0) {
            return Err(bad_input("the outputs are too short for the last parts"));
        }
        let bytes = self.buffers.iter().map(Given::bytes).collect::<PyResult<Vec<_>>>()?;
        let views =
            self.buffers.iter().zip(&bytes).map(|(own, bytes)| own.buffer(bytes)).collect::<PyResult<Vec<_>>>()?;
        let mut outs = outs.iter().map(|out| out.exclusive(bytes.as_flattened())).collect::<PyResult<Vec<_>>>()?;
        detached(py, || self.split.write(&views, outs.iter_mut().map(|out| out.bytes_mut()).collect()))
    }
}

/// Where a buffer lies: the memory, the range of its values, bits or offsets, and that of the bytes that offsets name.
pub type Place = (Option<Py<Segment>>, usize, usize, usize, usize);

/// Joins parts; gives the number of rows and, for each column, the place of each of its buffers.
pub fn join(
    py: Python<'_>,
    pool: &Arc<Pool>,
    parts: Vec<Bound<'_, PyAny>>,
    kinds: Vec<Vec<(String, usize)>>,
) -> PyResult<(usize, Vec<Vec<Place>>)> {
    let flat = kinds.iter().flatten().map(kind_of).collect::<PyResult<Vec<Kind>>>()?;
    let buffers = parts.iter().map(buffer_of).collect::<PyResult<Vec<_>>>()?;
    // SAFETY: `buffers` holds them, and nobody writes to fetched parts.
    let bytes = buffers.iter().map(|own| unsafe { bytes_of(own) }).collect::<PyResult<Vec<_>>>()?;
    let slices: Vec<&[u8]> = bytes.iter().map(|own| &**own).collect();
    let made = detached(py, || {
        let joined = measure(&slices, &flat).map_err(bad_input)?;
        let (lengths, placed) = place(joined.sizes());
        let take = |len: &usize| pool.take_for_result(*len).map_err(PyOSError::new_err_of);
        let mut segments = lengths.iter().map(take).collect::<PyResult<Vec<segment::Segment>>>()?;
        for (buffer, (segment, ranges)) in placed.iter().enumerate() {
            let out = segments[*segment].bytes_mut();
            let out = if ranges[0].is_empty() && ranges[1].is_empty() {
                [&mut [][..], &mut [][..]]
            } else {
                out.get_disjoint_mut(ranges.clone()).map_err(bad_input)?
            };
            joined.write(buffer, out);
        }
        Ok::<_, PyErr>((joined.rows(), segments, placed))
    })?;
    let (rows, segments, placed) = made?;
    let segments = segments.into_iter().map(|own| Py::new(py, Segment::new(own))).collect::<PyResult<Vec<_>>>()?;
    let mut placed = placed.into_iter().zip(&flat).map(|((segment, [first, second]), kind)| {
        let absent = *kind == Kind::Bits && first.is_empty() && rows > 0;
        let memory = (!absent).then(|| segments[segment].clone_ref(py));
        (memory, first.start, first.len(), second.start, second.len())
    });
    Ok((rows, kinds.iter().map(|column| placed.by_ref().take(column.len()).collect()).collect()))
}

/// Sorts the rows of parts that have one column of fixed width, in memory for results; `None`: there are gaps among them.
pub fn sorted(
    py: Python<'_>,
    pool: &Arc<Pool>,
    parts: Vec<Bound<'_, PyAny>>,
    width: usize,
) -> PyResult<Option<(usize, Segment)>> {
    let buffers = parts.iter().map(buffer_of).collect::<PyResult<Vec<_>>>()?;
    // SAFETY: `buffers` holds them, and nobody writes to fetched parts.
    let bytes = buffers.iter().map(|own| unsafe { bytes_of(own) }).collect::<PyResult<Vec<_>>>()?;
    let slices: Vec<&[u8]> = bytes.iter().map(|own| &**own).collect();
    let made = detached(py, || {
        let kinds = [Kind::Bits, Kind::Fixed(width)];
        let joined = measure(&slices, &kinds).map_err(bad_input)?;
        if joined.sizes()[0][0] > 0 {
            return Ok(None);
        }
        let mut out = pool.take_for_result(joined.sizes()[1][0]).map_err(PyOSError::new_err_of)?;
        let rows: Vec<&[u8]> = joined.values(1).collect();
        sort_rows(&rows, width, width, out.bytes_mut()).map_err(bad_input)?;
        Ok::<_, PyErr>(Some((joined.rows(), out)))
    })?;
    Ok(made?.map(|(rows, out)| (rows, Segment::new(out))))
}

/// Number of a piece of memory, and a buffer's two ranges in it.
type Placed = (usize, [Range<usize>; 2]);

/// Bytes of each piece of memory; and where each buffer goes.
fn place(sizes: &[[usize; 2]]) -> (Vec<usize>, Vec<Placed>) {
    // The first is shared.
    let mut lengths = vec![0];
    let mut placed = Vec::with_capacity(sizes.len());
    for [first, second] in sizes {
        let start = |len: usize| len.next_multiple_of(ALIGNMENT);
        let number = if first + second < OWN_MEMORY_MIN { 0 } else { lengths.len() };
        let at = if number == 0 { start(lengths[0]) } else { 0 };
        let second_at = start(at + first);
        let end = second_at + second;
        if number == 0 {
            lengths[0] = end
        } else {
            lengths.push(end)
        }
        placed.push((number, [at..at + first, second_at..end]));
    }
    (lengths, placed)
}

fn kind_of((kind, number): &(String, usize)) -> PyResult<Kind> {
    match (kind.as_str(), number) {
        ("fixed", 1..) => Ok(Kind::Fixed(*number)),
        ("bits", _) => Ok(Kind::Bits),
        ("variable", _) => Ok(Kind::Variable { wide: *number == 8 }),
        _ => Err(bad_input(format!("unknown kind of buffer ({kind:?}, {number})"))),
    }
}

/// Kind, width or first bit, values, offsets, bits of validity.
type DescribedColumn<'py> =
    (String, usize, Bound<'py, PyAny>, Option<Bound<'py, PyAny>>, Option<(Bound<'py, PyAny>, usize)>);

/// Hashes rows into `out`, which has 8 bytes for each: of one column its own, of several combined if `tuples`.
#[pyfunction]
pub fn columns_hash(
    py: Python<'_>,
    columns: Vec<DescribedColumn<'_>>,
    tuples: bool,
    out: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let out = PyBuffer::<u64>::get(out)?;
    if out.readonly() || !out.is_c_contiguous() {
        return Err(bad_input("the output is read-only or not contiguous"));
    }
    let mut held = Vec::new();
    for (kind, width, values, offsets, valid) in &columns {
        let offsets = offsets.as_ref().map(buffer_of).transpose()?;
        let valid = valid.as_ref().map(|(bits, start)| Ok::<_, PyErr>((buffer_of(bits)?, *start))).transpose()?;
        held.push((kind.as_str(), *width, buffer_of(values)?, offsets, valid));
    }
    // SAFETY: `held` has the buffers, and Python code does not write to columns that are being hashed.
    let bytes = |buffer| unsafe { bytes_of(buffer) };
    let mut slices = Vec::new();
    for (_, _, values, offsets, valid) in &held {
        let offsets = offsets.as_ref().map(bytes).transpose()?;
        let valid = valid.as_ref().map(|(bits, start)| Ok::<_, PyErr>((bytes(bits)?, *start))).transpose()?;
        slices.push((bytes(values)?, offsets, valid));
    }
    let described = held.iter().zip(&slices).map(|((kind, width, ..), (values, offsets, valid))| {
        Ok(match (*kind, offsets) {
            ("words", _) => Column::Words { width: *width, values },
            ("floats", _) => Column::Floats { width: *width, values },
            ("hashed", _) => Column::Hashed(values),
            ("texts", Some(offsets)) => Column::Texts {
                offsets: if *width == 4 { Offsets::Narrow(offsets) } else { Offsets::Wide(offsets) },
                values,
                valid: valid.as_ref().map(|(bits, start)| (&**bits, *start)),
            },
            (other, _) => return Err(bad_input(format!("unknown kind of column {other:?}"))),
        })
    });
    let described = described.collect::<PyResult<Vec<_>>>()?;
    let hashes: &mut [u64] = match out.item_count() {
        0 => &mut [],
        // SAFETY: contiguous and writable, of that many items, and made by the caller for this call alone.
        count => unsafe { std::slice::from_raw_parts_mut(out.buf_ptr().cast(), count) },
    };
    let done = detached(py, || match (&described[..], tuples) {
        ([column], false) => hash_column(*column, hashes),
        (_, true) => hash_rows(&described, hashes),
        _ => Err("one column, or tuples".into()),
    })?;
    done.map_err(bad_input)
}

/// Writes to `out` (8 bytes for each row) how many of the ascending splitters each row is not below.
#[pyfunction]
pub fn columns_ranges(
    py: Python<'_>,
    column: Described<'_>,
    splitters: Vec<Vec<u8>>,
    out: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let given = Given::new(column)?;
    let bytes = given.bytes()?;
    let buffer = given.buffer(&bytes)?;
    let out = PyBuffer::<i64>::get(out)?;
    if out.readonly() || !out.is_c_contiguous() {
        return Err(bad_input("the output is read-only or not contiguous"));
    }
    let numbers: &mut [i64] = match out.item_count() {
        0 => &mut [],
        // SAFETY: contiguous and writable, of that many items, and made by the caller for this call alone.
        count => unsafe { std::slice::from_raw_parts_mut(out.buf_ptr().cast(), count) },
    };
    detached(py, || ranges(&buffer, &splitters, numbers))?.map_err(bad_input)
}

/// Sorts rows of one width by their first bytes into `out`; equal keys keep their order.
#[pyfunction]
pub fn rows_sort(
    py: Python<'_>,
    inputs: Vec<Bound<'_, PyAny>>,
    width: usize,
    key: usize,
    out: &Segment,
) -> PyResult<()> {
    let buffers = inputs.iter().map(buffer_of).collect::<PyResult<Vec<_>>>()?;
    // SAFETY: `buffers` holds them, and the caller does not write to its inputs meanwhile.
    let inputs = buffers.iter().map(|buffer| unsafe { bytes_of(buffer) }).collect::<PyResult<Vec<_>>>()?;
    let mut out = out.exclusive(&inputs)?;
    detached(py, || sort_rows(&inputs.iter().map(|own| &**own).collect::<Vec<_>>(), width, key, out.bytes_mut()))?
        .map_err(bad_input)
}
