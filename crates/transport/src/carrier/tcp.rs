//! Plain TCP.

use super::http::{self, HttpConnection};
use super::{Carrier, Channel, Connection, Context};
use mission_core::flight::Leg;
use mission_core::host::fetches::Fault;
use mission_core::types::{Encryption, Transport};
use socket2::{Protocol, SockRef};
use std::fs::File;
use std::io::{self, IoSlice, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;

/// Below it a copy is as fast (docs/measurements.md).
const SENDFILE_MIN: usize = 1 << 20;

pub struct Tcp;

impl Carrier for Tcp {
    fn transport(&self) -> Transport {
        Transport::Tcp
    }

    fn connect(&self, address: SocketAddr, leg: &Leg, context: &Context) -> Result<Box<dyn Connection>, Fault> {
        let stream = http::connect(address, leg, Protocol::TCP)?;
        Ok(Box::new(HttpConnection::new(Plain(Arc::new(stream)), leg, context.token.clone())))
    }
}

/// A socket that another thread can shut down.
pub struct Plain(pub Arc<TcpStream>);

impl Read for Plain {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        (&*self.0).read(into)
    }
}

impl Write for Plain {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (&*self.0).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Channel for Plain {
    fn socket(&self) -> &Arc<TcpStream> {
        &self.0
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

    /// The kernel sends the very pages: one copy less. A page that is written anew before the receiver has read it, because its object was freed
    /// meanwhile, does not fit its checksum there.
    fn send_shared(&mut self, head: &[u8], body: &[u8], file: &File, offset: u64) -> io::Result<()> {
        if body.len() < SENDFILE_MIN {
            return self.send(head, body);
        }
        let sent = SockRef::from(&*self.0).send_with_flags(head, libc::MSG_MORE | libc::MSG_NOSIGNAL)?;
        (&*self.0).write_all(&head[sent..])?;
        super::sendfile(&self.0, file, offset, body.len() as u64)
    }

    fn send_file(&mut self, head: &[u8], file: &File, offset: u64, len: u64) -> io::Result<()> {
        (&*self.0).write_all(head)?;
        super::sendfile(&self.0, file, offset, len)
    }
}
