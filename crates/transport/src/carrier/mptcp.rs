//! Multipath TCP (RFC 8684): one connection over as many paths as both ends have.
//!
//! The kernel's path manager makes the subflows. What it made, and whether a box on the way took the option out so that
//! plain TCP is what is left, is read back from the socket.

use super::http::{self, HttpConnection};
use super::{Carrier, Connection, Context};
use mission_core::flight::Leg;
use mission_core::host::fetches::Fault;
use mission_core::types::Transport;
use socket2::{Domain, Protocol, Socket, Type};
use std::net::SocketAddr;
use std::sync::OnceLock;

pub struct Mptcp;

impl Carrier for Mptcp {
    fn transport(&self) -> Transport {
        Transport::Mptcp
    }

    /// Kernels are built without it, and administrators turn it off (`net.mptcp.enabled`).
    fn available(&self) -> bool {
        static AVAILABLE: OnceLock<bool> = OnceLock::new();
        *AVAILABLE.get_or_init(|| Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::MPTCP)).is_ok())
    }

    fn connect(&self, address: SocketAddr, leg: &Leg, context: &Context) -> Result<Box<dyn Connection>, Fault> {
        let plain = http::connect(address, leg, Protocol::MPTCP)?;
        Ok(Box::new(HttpConnection::new(plain, leg, address, context)))
    }
}
