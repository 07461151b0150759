//! ICTCP: the tcp carrier, whose receive windows this process governs.

use super::http::{self, HttpConnection};
use super::tcp::Plain;
use super::{Below, Carrier, Channel, Connection, Context};
use crate::windows::Governed;
use mission_core::flight::Leg;
use mission_core::host::fetches::Fault;
use mission_core::types::{Encryption, Transport};
use socket2::Protocol;
use std::io::{self, Read, Write};
use std::net::SocketAddr;

pub struct Ictcp;

impl Carrier for Ictcp {
    fn transport(&self) -> Transport {
        Transport::Ictcp
    }

    fn connect(&self, address: SocketAddr, leg: &Leg, context: &Context) -> Result<Box<dyn Connection>, Fault> {
        let denied = || Fault::Denied("this host does not know its link's rate: set MISSION_LINK_RATE".into());
        let governor = context.governor.as_ref().ok_or_else(denied)?;
        let plain = http::connect(address, leg, Protocol::TCP)?;
        let governed = governor.govern(plain.0.clone()).map_err(|error| Fault::Connection(error.to_string()))?;
        let channel = Channeled { plain, _governed: governed };
        Ok(Box::new(HttpConnection::new(channel, leg, address, context)))
    }
}

struct Channeled {
    plain: Plain,
    _governed: Governed,
}

impl Read for Channeled {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.plain.read(into)
    }
}

impl Write for Channeled {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.plain.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.plain.flush()
    }
}

impl Channel for Channeled {
    fn below(&self) -> &dyn Below {
        &self.plain
    }

    fn encryption(&self) -> Encryption {
        self.plain.encryption()
    }

    fn tls(&self) -> Option<String> {
        self.plain.tls()
    }
}
