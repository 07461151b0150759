//! Events and commands of a replica.

use super::*;

#[derive(Clone, Debug)]
pub enum Event {
    /// The complete store, at a revision: replaces these books. `leader`: the text of the leader's key.
    Loaded {
        revision: u64,
        entries: Vec<Entry>,
        leader: Option<Arc<str>>,
    },
    /// What was written at a revision, in order. `leader`: a replica got the leader's key (its text), or lost it.
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
    /// It did not get the leader's key.
    NotElected,
    /// It lost the leader's key. `epoch`: of the request; `None`: of the last one.
    Deposed {
        epoch: Option<Epoch>,
    },
    /// A write is in the store, as of a revision.
    Written {
        write: WriteId,
        revision: u64,
    },
    /// A write did not happen, or its result is unknown.
    Unwritten {
        write: WriteId,
        why: String,
    },
    /// The store does not answer, and why; or it answers again.
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

/// A change by an operator.
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
    /// The request is invalid.
    Wrong(String),
    /// Ask another replica, or this one later: nothing was changed.
    Elsewhere(String),
    /// It is unknown whether the change happened.
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
    /// Replicas with the same tokens have the same text here, which reveals nothing else about the tokens.
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
