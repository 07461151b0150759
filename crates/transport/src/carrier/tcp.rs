//! Plain TCP.

use super::http::{self, HttpConnection};
use super::{Carrier, Channel, Connection, Context};
use mission_core::flight::Leg;
use mission_core::host::fetches::Fault;
use mission_core::types::{Encryption, Transport};
use socket2::Protocol;
use std::fs::File;
use std::io::{self, IoSlice, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;

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

    fn send_file(&mut self, head: &[u8], file: &File, offset: u64, len: u64) -> io::Result<()> {
        (&*self.0).write_all(head)?;
        super::sendfile(&self.0, file, offset, len)
    }
}
