//! Rows that were split and joined are the rows that went in, in their order; whatever else is in a part is refused.

use mission_columns::{Buffer, Kind, Offsets, Split, measure};
use proptest::prelude::*;

/// A row of one column of each kind.
type Row = (u64, bool, bool, Vec<u8>, [u8; 3]);

/// Columns of these rows: eight bytes, bits, bits that may be all set, narrow offsets, wide offsets, three bytes.
struct Columns {
    numbers: Vec<u8>,
    bits: Vec<u8>,
    valid: Option<Vec<u8>>,
    narrow: Vec<u8>,
    wide: Vec<u8>,
    text: Vec<u8>,
    odd: Vec<u8>,
}

const START: usize = 3;
const KINDS: [Kind; 6] = [
    Kind::Fixed(8),
    Kind::Bits,
    Kind::Bits,
    Kind::Variable { wide: false },
    Kind::Variable { wide: true },
    Kind::Fixed(3),
];

impl Columns {
    fn new(rows: &[Row]) -> Columns {
        let bits = |start: usize, set: &dyn Fn(&Row) -> bool| {
            let mut bits = vec![0xa5; (rows.len() + start).div_ceil(8) + 1];
            for (at, row) in rows.iter().enumerate() {
                let (byte, bit) = ((at + start) / 8, 1 << ((at + start) % 8));
                bits[byte] = bits[byte] & !bit | if set(row) { bit } else { 0 };
            }
            bits
        };
        let mut ends = vec![2i64];
        let mut text = b"..".to_vec();
        for row in rows {
            text.extend(&row.3);
            ends.push(text.len() as i64);
        }
        Columns {
            numbers: rows.iter().flat_map(|row| row.0.to_le_bytes()).collect(),
            bits: bits(START, &|row| row.1),
            valid: rows.iter().any(|row| !row.2).then(|| bits(0, &|row| row.2)),
            narrow: ends.iter().flat_map(|end| (*end as i32).to_le_bytes()).collect(),
            wide: ends.iter().flat_map(|end| end.to_le_bytes()).collect(),
            text,
            odd: rows.iter().flat_map(|row| row.4).collect(),
        }
    }

    fn buffers(&self) -> [Buffer<'_>; 6] {
        [
            Buffer::Fixed { width: 8, values: &self.numbers },
            Buffer::Bits { bits: &self.bits, start: START },
            self.valid.as_ref().map_or(Buffer::AllSet, |bits| Buffer::Bits { bits, start: 0 }),
            Buffer::Variable { offsets: Offsets::Narrow(&self.narrow), values: &self.text },
            Buffer::Variable { offsets: Offsets::Wide(&self.wide), values: &self.text },
            Buffer::Fixed { width: 3, values: &self.odd },
        ]
    }

    /// Each part.
    fn split(&self, partitions: &[i64], part_of: &[u32], parts: usize) -> (Vec<Vec<u8>>, u64) {
        let split = Split::new(partitions, part_of, parts).unwrap();
        let sizes = split.sizes(&self.buffers()).unwrap();
        // The first part lies in memory of its own.
        let (first, others) = sizes.split_at(1);
        let mut outs = [first, others].map(|sizes| vec![0xee; sizes.iter().sum::<u64>() as usize]);
        split.write(&self.buffers(), outs.iter_mut().map(|out| &mut out[..]).collect());
        let all = outs.concat();
        let mut rest = &all[..];
        let parts = sizes.iter().map(|size| rest.split_off(..*size as usize).unwrap().to_vec()).collect();
        (parts, split.unwanted())
    }
}

fn joined(parts: &[&[u8]]) -> Result<Vec<Row>, String> {
    let joined = measure(parts, &KINDS)?;
    let mut columns = Vec::new();
    for (buffer, sizes) in joined.sizes().iter().enumerate() {
        let [mut first, mut second] = sizes.map(|size| vec![0xdd; size]);
        joined.write(buffer, [&mut first, &mut second]);
        columns.push((first, second));
    }
    let bit = |column: usize, row: usize| {
        let bits = &columns[column].0;
        bits.is_empty() || bits[row / 8] >> (row % 8) & 1 == 1
    };
    let rows = (0..joined.rows()).map(|row| {
        let narrow = |at: usize| i32::from_le_bytes(columns[3].0.as_chunks().0[at]) as usize;
        let wide = |at: usize| i64::from_le_bytes(columns[4].0.as_chunks().0[at]) as usize;
        let text = &columns[3].1[narrow(row)..narrow(row + 1)];
        if text != &columns[4].1[wide(row)..wide(row + 1)] {
            return Err(format!("the texts of row {row} differ"));
        }
        let number = u64::from_le_bytes(columns[0].0.as_chunks().0[row]);
        Ok((number, bit(1, row), bit(2, row), text.to_vec(), columns[5].0.as_chunks().0[row]))
    });
    rows.collect()
}

fn a_row() -> impl Strategy<Value = Row> {
    (any::<u64>(), any::<bool>(), prop::bool::weighted(0.9), prop::collection::vec(any::<u8>(), 0..5), any::<[u8; 3]>())
}

/// Inputs of rows with the output partition of each.
fn inputs() -> impl Strategy<Value = Vec<Vec<(Row, i64)>>> {
    prop::collection::vec(prop::collection::vec((a_row(), 0i64..6), 0..40), 0..5)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn every_row_arrives_once_in_its_part_and_in_order(inputs in inputs(), unwanted in 0u32..6) {
        let part_of: Vec<u32> = (0..6).map(|own| if own == unwanted { u32::MAX } else { own - u32::from(own > unwanted) }).collect();
        let mut split = Vec::new();
        for input in &inputs {
            let (rows, partitions): (Vec<Row>, Vec<i64>) = input.iter().cloned().unzip();
            let (parts, left) = Columns::new(&rows).split(&partitions, &part_of, 5);
            prop_assert_eq!(left as usize, partitions.iter().filter(|own| **own == i64::from(unwanted)).count());
            split.push(parts);
        }
        for (partition, part) in part_of.iter().enumerate().filter(|(_, part)| **part != u32::MAX) {
            let own: Vec<&[u8]> = split.iter().map(|parts| &parts[*part as usize][..]).collect();
            let expected: Vec<Row> = inputs.iter().flatten().filter(|(_, own)| *own == partition as i64).map(|(row, _)| row.clone()).collect();
            prop_assert_eq!(joined(&own).unwrap(), expected);
        }
    }

    /// The bytes come from another process: nothing in them may be read or written beyond its end.
    #[test]
    fn a_damaged_part_is_refused_or_read_within_its_bounds(
        rows in prop::collection::vec(a_row(), 1..20), cut in any::<prop::sample::Index>(), damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
    ) {
        let (mut parts, _) = Columns::new(&rows).split(&vec![0; rows.len()], &[0], 1);
        let part = &mut parts[0];
        let cut = cut.index(part.len());
        prop_assert!(cut == 0 || joined(&[&part[..cut]]).is_err());
        for (at, value) in damage {
            let at = at.index(part.len());
            part[at] = value;
        }
        let _ = joined(&[&part[..]]);
    }
}

#[test]
fn rows_without_a_partition_and_buffers_that_are_too_short_are_named() {
    let new = |partitions: &[i64]| Split::new(partitions, &[0, 1], 2).map(|_| ()).unwrap_err();
    assert_eq!(new(&[0, 2]), "row 1 has output partition 2, but there are 2, from 0");
    assert_eq!(new(&[-1]), "row 0 has output partition -1, but there are 2, from 0");
    let split = Split::new(&[0, 1, 0], &[0, 1], 2).unwrap();
    let sizes = |buffer: Buffer<'_>| split.sizes(&[buffer]).unwrap_err();
    assert_eq!(sizes(Buffer::Fixed { width: 8, values: &[0; 23] }), "buffer 0: it has 2 of 3 rows");
    assert_eq!(sizes(Buffer::Bits { bits: &[0], start: 6 }), "buffer 0: it has 2 of 3 rows");
    let offsets: Vec<u8> = [0, 4, 2, 9].iter().flat_map(|own: &i32| own.to_le_bytes()).collect();
    let variable = |offsets, values| sizes(Buffer::Variable { offsets: Offsets::Narrow(offsets), values });
    assert_eq!(variable(&offsets, &[0; 9]), "buffer 0: row 1 lies from 4 to 2, of 9 bytes");
    assert_eq!(variable(&offsets[..8], &[0; 9]), "buffer 0: it has 1 of 3 rows");
}

#[test]
fn an_input_without_rows_needs_no_offsets() {
    let split = Split::new(&[], &[0, 1], 2).unwrap();
    let empty = Buffer::Variable { offsets: Offsets::Wide(&[]), values: &[] };
    assert_eq!(split.sizes(&[empty]).unwrap(), [0, 0]);
    split.write(&[empty], vec![]);
}
