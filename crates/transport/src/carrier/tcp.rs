//! Plain TCP.

use super::http::{self, HttpConnection};
use super::tls::Tls;
use super::{Below, Carrier, Channel, Connection, Context, End};
use crate::facts::Sender;
use crate::socket;
use mission_core::flight::Leg;
use mission_core::host::fetches::Fault;
use mission_core::types::{Encryption, Transport};
use socket2::Protocol;
use std::fs::File;
use std::io::{self, IoSlice, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;

pub struct Tcp;

impl Carrier for Tcp {
    fn transport(&self) -> Transport {
        Transport::Tcp
    }

    fn connect(&self, address: SocketAddr, leg: &Leg, context: &Context) -> Result<Box<dyn Connection>, Fault> {
        let plain = http::connect(address, leg, Protocol::TCP)?;
        Ok(Box::new(HttpConnection::new(plain, leg, address, context)))
    }

    /// Anything that is not TLS: clients of all carriers without TLS begin alike.
    fn begins_with(&self, first: u8) -> bool {
        !Tls.begins_with(first)
    }

    fn accept(&self, incoming: Incoming, _context: &Context) -> io::Result<Box<dyn Channel>> {
        Ok(Box::new(incoming.plain()))
    }
}

/// A TCP or MPTCP connection that another thread can end, as a client has made it.
pub struct Incoming(Arc<TcpStream>);

impl Incoming {
    pub fn of(stream: Arc<TcpStream>) -> Incoming {
        Incoming(stream)
    }

    /// Peeks at the first byte of the client; it remains unread.
    ///
    /// # Errors
    /// The client went away.
    pub fn first(&self) -> io::Result<u8> {
        let mut first = [0];
        if self.0.peek(&mut first)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(first[0])
    }

    pub(super) fn plain(self) -> Plain {
        Plain(self.0)
    }
}

/// A socket as the byte stream that it is.
pub(super) struct Plain(pub Arc<TcpStream>);

impl End for TcpStream {
    fn end(&self) {
        let _ = self.shutdown(Shutdown::Both);
    }
}

impl Below for Plain {
    fn peer(&self) -> io::Result<IpAddr> {
        Ok(self.0.peer_addr()?.ip())
    }

    fn ends(&self) -> Arc<dyn End> {
        self.0.clone()
    }

    fn ask(&self, congestion_control: Option<&str>, rto_min_us: Option<u32>) -> (String, Option<u32>) {
        if let Some(name) = congestion_control {
            let _ = socket::set_congestion_control(&self.0, name);
        }
        if let Some(value) = rto_min_us {
            let _ = socket::set_rto_min_us(&self.0, value);
        }
        (socket::congestion_control(&self.0), socket::rto_min_us(&self.0))
    }

    fn facts(&self) -> Sender {
        let info = socket::tcp_info(&self.0);
        Sender {
            rto_us: info.rto_us,
            rtt_us: info.rtt_us,
            cwnd: info.cwnd,
            retransmits: info.retransmits,
            timeouts: info.timeouts,
            marks: info.delivered_ce,
            ..Sender::default()
        }
    }

    fn subflows(&self) -> Option<u32> {
        socket::mptcp_info(&self.0)
    }
}

impl Read for Plain {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        (&*self.0).read(into)
    }
}

impl Write for Plain {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (&*self.0).write(bytes)
    }

    /// Else a TLS session would write its records one by one.
    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        (&*self.0).write_vectored(slices)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsRef<Plain> for Plain {
    fn as_ref(&self) -> &Plain {
        self
    }
}

impl Channel for Plain {
    fn below(&self) -> &dyn Below {
        self
    }

    fn encryption(&self) -> Encryption {
        Encryption::None
    }

    fn tls(&self) -> Option<String> {
        None
    }

    fn send(&mut self, head: &[u8], body: &[u8]) -> io::Result<()> {
        let mut slices = [IoSlice::new(head), IoSlice::new(body)];
        let mut slices = &mut slices[..];
        while !slices.is_empty() {
            match (&*self.0).write_vectored(slices) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => IoSlice::advance_slices(&mut slices, count),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn send_file(&mut self, head: &[u8], file: &File, offset: u64, len: u64) -> io::Result<()> {
        (&*self.0).write_all(head)?;
        super::sendfile(&*self.0, file, offset, len)
    }
}
