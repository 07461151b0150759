//! The words of the project as types (docs/reference/glossary.md).

use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Name of a job, unique in its cluster.
pub type JobId = Arc<str>;
/// Name of a stage of a job (in Dask: a task group).
pub type Stage = Arc<str>;
/// Address of a worker process, as the engine knows it.
pub type WorkerId = Arc<str>;
/// Name of a host: one network namespace of one machine.
pub type HostId = Arc<str>;

/// Name of an object, which is never reused: 128 random bits; 32 hexadecimal digits as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectId(pub u128);

impl std::fmt::Display for ObjectId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl std::str::FromStr for ObjectId {
    type Err = String;

    fn from_str(text: &str) -> Result<ObjectId, String> {
        let digits = text.len() == 32 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        let number = u128::from_str_radix(text, 16).ok().filter(|_| digits);
        number.map(ObjectId).ok_or_else(|| format!("{text:?} is no name of an object: it has 32 hexadecimal digits"))
    }
}

impl Serialize for ObjectId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ObjectId {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<ObjectId, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// All flows that move data between two stages of a job: a coflow.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TransferId {
    pub job: JobId,
    /// Stage that wrote the objects.
    pub from: Stage,
    /// Stage that fetches them.
    pub to: Stage,
}

/// How a transfer moves data between its senders and its receivers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pattern {
    /// Every receiver takes its own parts of many objects.
    Shuffle,
    /// Many receivers take the same parts.
    Broadcast,
    /// One receiver takes from many senders: the incast pattern.
    Gather,
    OneToOne,
    /// Nothing was fetched yet; weighs as a shuffle.
    Unknown,
}

impl Pattern {
    pub fn name(self) -> &'static str {
        match self {
            Pattern::Shuffle => "shuffle",
            Pattern::Broadcast => "broadcast",
            Pattern::Gather => "gather",
            Pattern::OneToOne => "one-to-one",
            Pattern::Unknown => "unknown",
        }
    }
}

/// What a job demands of its encryption.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Encryption {
    #[default]
    None,
    /// Encrypted without authentication: protects only against passive readers (as TCPcrypt, RFC 8548, did).
    Opportunistic,
    /// Encrypted, and both ends present a certificate of the cluster.
    Authenticated,
}

impl Encryption {
    /// All values, weakest first.
    pub const ALL: [Encryption; 3] = [Encryption::None, Encryption::Opportunistic, Encryption::Authenticated];

    pub fn name(self) -> &'static str {
        match self {
            Encryption::None => "none",
            Encryption::Opportunistic => "opportunistic",
            Encryption::Authenticated => "authenticated",
        }
    }

    pub fn named(name: &str) -> Option<Encryption> {
        Encryption::ALL.into_iter().find(|encryption| encryption.name() == name)
    }
}

/// Kinds of transport; each has a Flight Controller in [`crate::flight`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    Shm,
    Mptcp,
    Dctcp,
    Tls,
    Ictcp,
    Tcp,
}

impl Transport {
    pub const ALL: [Transport; 6] =
        [Transport::Shm, Transport::Mptcp, Transport::Dctcp, Transport::Tls, Transport::Ictcp, Transport::Tcp];

    pub fn name(self) -> &'static str {
        match self {
            Transport::Shm => "shm",
            Transport::Mptcp => "mptcp",
            Transport::Dctcp => "dctcp",
            Transport::Tls => "tls",
            Transport::Ictcp => "ictcp",
            Transport::Tcp => "tcp",
        }
    }
}

/// Limit, so that the sum of many priorities is finite, and the smallest share is above 0.
pub const PRIORITY_MAX: f64 = 1e9;

/// Whether a job can have this priority.
///
/// # Errors
/// One line that names what is allowed.
pub fn check_priority(job: &str, priority: f64) -> Result<(), String> {
    if priority.is_finite() && priority > 0.0 && priority <= PRIORITY_MAX {
        return Ok(());
    }
    Err(format!("priority {priority} of job {job}: use a number above 0, at most {PRIORITY_MAX:e}"))
}

/// Letters that the name of a job, its user or its class may have: names are in every report, log and metric.
pub const NAME_MAX: usize = 256;

/// Whether something can have this name.
///
/// # Errors
/// One line that names what is allowed.
pub fn check_name(what: &str, name: &str) -> Result<(), String> {
    if !name.is_empty() && name.chars().count() <= NAME_MAX && !name.chars().any(is_unprintable) {
        return Ok(());
    }
    let start: String = name.chars().take(40).collect();
    Err(format!("{what} {start:?}: use 1 to {NAME_MAX} letters that can be printed"))
}

/// Makes a valid name: shortened, and without unprintable letters.
pub fn fit_name(name: &str) -> String {
    name.chars().take(NAME_MAX / 2).map(|letter| if is_unprintable(letter) { '?' } else { letter }).collect()
}

/// Control characters drive a terminal; format characters and separators of lines change what a reader sees
/// (Unicode 16, general categories Cc, Cf, Zl, Zp).
fn is_unprintable(letter: char) -> bool {
    letter.is_control()
        || matches!(letter,
            '\u{ad}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{70f}' | '\u{890}' | '\u{891}' | '\u{8e2}'
            | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{2064}'
            | '\u{2066}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{110bd}' | '\u{110cd}'
            | '\u{13430}'..='\u{1343f}' | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}' | '\u{e0001}'
            | '\u{e0020}'..='\u{e007f}')
}

/// What the user specifies for a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobSpec {
    pub job: JobId,
    /// Above 0, at most [`PRIORITY_MAX`].
    #[serde(default = "one")]
    pub priority: f64,
    #[serde(default)]
    pub demands: Demands,
    /// Hosts that the job uses; 0: as many as send or receive in a transfer.
    #[serde(default)]
    pub machines: u32,
    /// Whose job it is, for policies.
    #[serde(default)]
    pub user: Option<Arc<str>>,
    /// What kind of job it is, for policies: any word.
    #[serde(default)]
    pub class: Option<Arc<str>>,
    /// Seconds after its arrival by which the user wants it done.
    #[serde(default)]
    pub deadline_secs: Option<f64>,
}

impl JobSpec {
    /// Checks the specification, independently of the cluster.
    ///
    /// # Errors
    /// One line that names the invalid value.
    pub fn check(&self) -> Result<(), String> {
        check_name("job", &self.job)?;
        for (what, word) in [("user", &self.user), ("class", &self.class)] {
            word.as_ref().map_or(Ok(()), |word| check_name(what, word))?;
        }
        check_priority(&self.job, self.priority)
    }

    /// A job of which nothing else is known.
    pub fn named(job: JobId) -> JobSpec {
        JobSpec {
            job,
            priority: 1.0,
            demands: Demands::default(),
            machines: 0,
            user: None,
            class: None,
            deadline_secs: None,
        }
    }
}

/// What a job demands; it is refused if that is not available.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Demands {
    #[serde(default)]
    pub encrypt: Encryption,
    /// `None`: Mission Control chooses.
    #[serde(default)]
    pub transport: Option<Transport>,
}

fn one() -> f64 {
    1.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_no_letter_that_changes_what_a_terminal_or_a_reader_sees() {
        for hidden in ['\u{1b}', '\n', '\u{9b}', '\u{202e}', '\u{200b}', '\u{2028}', '\u{feff}', '\u{e0041}'] {
            let name = format!("re{hidden}port");
            assert!(check_name("job", &name).is_err(), "{hidden:?}");
            assert_eq!(fit_name(&name), "re?port");
        }
        for name in ["report 7", "Übersicht", "報告", "отчёт", "📊"] {
            assert!(check_name("job", name).is_ok());
            assert_eq!(fit_name(name), name);
        }
    }

    #[test]
    fn what_a_job_demands_by_a_misspelt_word_is_no_job() {
        let read = |text: &str| serde_json::from_str::<JobSpec>(text).map_err(|error| error.to_string());
        assert!(read(r#"{"job": "report", "demands": {"encrypt": "opportunistic"}}"#).is_ok());
        for text in
            [r#"{"job": "report", "encrypt": true}"#, r#"{"job": "report", "demands": {"encrpyt": "opportunistic"}}"#]
        {
            let why = read(text).unwrap_err();
            assert!(why.contains("unknown field `enc"), "{why}");
        }
    }
}
