//! What a replica hears, and what it wants done.

use super::*;

#[derive(Clone, Debug)]
pub enum Event {
    /// All that the store has, as of a revision: instead of what these books have. `leader`: as in the leader's key.
    Loaded {
        revision: u64,
        entries: Vec<Entry>,
        leader: Option<Arc<str>>,
    },
    /// What was written at a revision, in order. `leader`: somebody got the leader's key (its text), or lost it.
    Changed {
        revision: u64,
        entries: Vec<Entry>,
        leader: Option<Option<Arc<str>>>,
    },
    /// This replica has the leader's key, at least until then unless it is renewed.
    Elected {
        epoch: Epoch,
        until: Time,
    },
    Renewed {
        until: Time,
    },
    /// It did not get it.
    NotElected,
    /// It has it no more. `epoch`: of what was asked; `None`: of the last.
    Deposed {
        epoch: Option<Epoch>,
    },
    /// A write is in the store, as of a revision.
    Written {
        write: WriteId,
        revision: u64,
    },
    /// A write did not happen, or nobody knows.
    Unwritten {
        write: WriteId,
        why: String,
    },
    /// The store does not answer, and why; or does again.
    Store {
        problem: Option<String>,
    },
    Opened {
        session: SessionId,
    },
    Said {
        session: SessionId,
        message: ToService,
    },
    Closed {
        session: SessionId,
    },
    Asks {
        ask: AskId,
        asked: Asked,
    },
    Tick,
}

/// What an operator wants changed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "kebab-case")]
pub enum Asked {
    Policy { policy: String },
    Change { cluster: ClusterId, job: JobId, change: Change },
    Drain { host: HostId },
    Undrain { host: HostId },
}

#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// Try to get the leader's key.
    Campaign,
    /// Renew the lease.
    Renew,
    /// Give the leader's key back: this replica does not act any more.
    Resign,
    /// Write these, if the leader's key still has this epoch.
    Write {
        write: WriteId,
        epoch: Epoch,
        entries: Vec<Entry>,
    },
    Say {
        session: SessionId,
        message: FromService,
    },
    Close {
        session: SessionId,
    },
    Answer {
        ask: AskId,
        result: Result<(), Refused>,
    },
}

/// Why nothing was changed, in one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// It makes no sense, or cannot be.
    Wrong(String),
    /// Another replica is to be asked, or this one later: nothing was changed.
    Elsewhere(String),
    /// Nobody knows whether it is changed.
    Unknown(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    Leader,
    Follower,
}

/// A replica, as it names itself in the leader's key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leader {
    /// Where members find it.
    pub address: Arc<str>,
    /// Replicas that have the same tokens have the same text here, which says nothing else of them.
    pub tokens: Arc<str>,
}

impl Leader {
    /// As [`text`](Leader::text) has written it.
    pub(super) fn read(text: &str) -> Leader {
        let (address, tokens) = text.split_once(' ').unwrap_or((text, ""));
        Leader { address: address.into(), tokens: tokens.into() }
    }

    /// In the leader's key.
    pub fn text(&self) -> String {
        format!("{} {}", self.address, self.tokens)
    }
}
