//! Compression of a host's report: the transport facts of its processes are mostly equal, and are sent once.

use super::WorkerReport;
use crate::report::{TransferReport, TransportFacts};

/// How many recent facts a record is compared with. A message with more different ones is longer, not wrong.
const LOOKED_AT: usize = 64;

impl WorkerReport {
    /// Moves the facts of all records into one table, each once.
    pub fn folded(mut self) -> WorkerReport {
        let mut facts: Vec<TransportFacts> = Vec::new();
        for record in self.records.iter_mut().chain(self.others.iter_mut().flat_map(|(_, own)| &mut own.records)) {
            fold(&mut facts, record);
        }
        self.facts = facts;
        self
    }

    /// Restores the records; those whose facts are not in the table have none.
    pub fn unfolded(mut self) -> WorkerReport {
        let facts = std::mem::take(&mut self.facts);
        for record in self.records.iter_mut().chain(self.others.iter_mut().flat_map(|(_, own)| &mut own.records)) {
            if let Some(own) = record.facts.take().and_then(|place| facts.get(place)) {
                let TransportFacts { observed, bytes, .. } = std::mem::take(&mut record.transport);
                record.transport = TransportFacts { observed, bytes, ..own.clone() };
            }
        }
        self
    }
}

fn fold(facts: &mut Vec<TransportFacts>, record: &mut TransferReport) {
    let mut own = std::mem::take(&mut record.transport);
    // Counters stay with the record.
    std::mem::swap(&mut own.observed, &mut record.transport.observed);
    std::mem::swap(&mut own.bytes, &mut record.transport.bytes);
    let from = facts.len().saturating_sub(LOOKED_AT);
    let place = facts[from..].iter().position(|known| *known == own).map(|place| from + place);
    record.facts = Some(place.unwrap_or_else(|| {
        facts.push(own);
        facts.len() - 1
    }));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Transport;

    fn record(to: &str, reason: &str, bytes: u64) -> TransferReport {
        let transport = TransportFacts {
            chosen: Some(Transport::Tcp),
            reason: reason.into(),
            bytes: [(Transport::Tcp, bytes)].into(),
            ..TransportFacts::default()
        };
        TransferReport { job: "etl".into(), from: "m".into(), to: to.into(), transport, ..TransferReport::default() }
    }

    fn report(records: Vec<TransferReport>) -> WorkerReport {
        WorkerReport { records, ..WorkerReport::default() }
    }

    #[test]
    fn what_is_alike_is_said_once_and_comes_back_as_it_was() {
        let mut said = report(vec![record("r", "demanded", 1), record("s", "fastest", 2)]);
        said.others = (0..3).map(|own| (format!("{own}").into(), report(vec![record("r", "demanded", own)]))).collect();
        let folded = said.clone().folded();
        assert_eq!(folded.facts.len(), 2);
        let text = serde_json::to_string(&folded).unwrap();
        assert_eq!(text.matches("demanded").count(), 1);
        assert_eq!(serde_json::from_str::<WorkerReport>(&text).unwrap().unfolded(), said);
        // One that was never folded.
        assert_eq!(said.clone().unfolded(), said);
    }

    #[test]
    fn a_place_that_the_table_does_not_have_gives_no_facts() {
        let mut said = report(vec![record("r", "demanded", 1)]).folded();
        said.records[0].facts = Some(7);
        let transport = said.unfolded().records.remove(0).transport;
        assert_eq!((transport.reason.as_str(), transport.bytes[&Transport::Tcp]), ("", 1));
    }
}
