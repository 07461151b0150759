//! DCTCP: the tcp carrier, where this kernel has that congestion control. The leg names it to both ends.

use super::tcp::Tcp;
use super::{Carrier, Connection, Context};
use mission_core::flight::Leg;
use mission_core::host::fetches::Fault;
use mission_core::types::Transport;
use std::net::SocketAddr;

pub struct Dctcp;

impl Carrier for Dctcp {
    fn transport(&self) -> Transport {
        Transport::Dctcp
    }

    fn available(&self) -> bool {
        let known = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_available_congestion_control");
        known.is_ok_and(|known| known.split_whitespace().any(|name| name == Transport::Dctcp.name()))
    }

    fn connect(&self, address: SocketAddr, leg: &Leg, context: &Context) -> Result<Box<dyn Connection>, Fault> {
        Tcp.connect(address, leg, context)
    }
}
