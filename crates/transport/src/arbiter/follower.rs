//! A process that gets its slots from another.

use super::{MESSAGE_BYTES, Peer, Role, SLOW_PEER, Said, Shared};
use crate::local::{Incoming, Outgoing};
use std::os::unix::net::UnixStream;
use std::time::Instant;

impl Shared {
    pub(super) fn follow(&self, stream: UnixStream, generation: u64) {
        let mut state = self.lock();
        if state.closing {
            return;
        }
        // Messages are sent under locks.
        let _ = stream.set_write_timeout(Some(SLOW_PEER));
        state.generation = generation;
        state.epoch += 1;
        state.alone = None;
        state.role = Role::Follower(Peer { stream, sent: Outgoing::default() });
        state.inbox.push_back(Said::Joined { remote: true });
        drop(state);
        (self.wake)();
    }

    pub(super) fn read(&self, mut stream: UnixStream, epoch: u64) {
        let mut messages = Incoming::new(MESSAGE_BYTES);
        while let Ok(Some(message)) = messages.read(&mut stream) {
            let mut state = self.lock();
            if state.epoch != epoch {
                return;
            }
            state.inbox.push_back(Said::Message(message));
            drop(state);
            (self.wake)();
        }
        let mut state = self.lock();
        if state.epoch == epoch {
            state.epoch += 1;
            state.role = Role::Electing;
            state.parted_at = Some(Instant::now());
            state.inbox.push_back(Said::Lost);
        }
        drop(state);
        (self.wake)();
    }
}
