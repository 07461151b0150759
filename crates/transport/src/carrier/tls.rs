//! TLS 1.3 over TCP.

use super::http::{self, HttpConnection};
use super::tcp::Plain;
use super::{Below, Carrier, Channel, Connection, Context, Incoming};
use crate::clock::lasting;
use crate::tls::{AUTHENTICATED, OPPORTUNISTIC, TlsSettings};
use mission_core::defaults::STALL;
use mission_core::flight::Leg;
use mission_core::host::fetches::Fault;
use mission_core::types::{Encryption, Transport};
use rustls::pki_types::ServerName;
use rustls::server::Acceptor;
use rustls::{ClientConnection, ServerConnection, StreamOwned};
use socket2::Protocol;
use std::io::{self, BufReader, IoSlice, Read, Write};
use std::net::SocketAddr;
use std::time::Instant;

/// RFC 9266, section 2.
const EXPORTER: &[u8] = b"EXPORTER-Channel-Binding";

/// The content type of a handshake record (RFC 8446, section 5.1).
const HANDSHAKE: u8 = 22;

/// Most bytes that a client reads from the kernel in one call.
const READ_AHEAD: usize = 64 << 10;

pub struct Tls;

impl Carrier for Tls {
    fn transport(&self) -> Transport {
        Transport::Tls
    }

    fn connect(&self, address: SocketAddr, leg: &Leg, context: &Context) -> Result<Box<dyn Connection>, Fault> {
        let (ends, name) = match leg.encryption {
            Encryption::Authenticated => {
                let missing = || Fault::Denied("this process has no certificate of the cluster".into());
                (context.tls.authenticated.as_ref().ok_or_else(missing)?, AUTHENTICATED)
            }
            _ => (&context.tls.opportunistic, OPPORTUNISTIC),
        };
        let mut stream = http::connect(address, leg, Protocol::TCP)?;
        let fault = |error: &dyn std::fmt::Display| Fault::Connection(format!("TLS with {address}: {error}"));
        let name = ServerName::try_from(name).expect("a constant that is a name");
        let end = Instant::now() + lasting(STALL);
        let mut session = ClientConnection::new(ends.client.clone(), name).map_err(|error| fault(&error))?;
        while session.is_handshaking() {
            session.complete_io(&mut Until { stream: &mut stream, end }).map_err(|error| {
                // A wrong certificate will be wrong the next time, too.
                match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
                    Some(rustls::Error::InvalidCertificate(why)) => {
                        Fault::Denied(format!("the certificate of {address}: {why:?}"))
                    }
                    Some(rustls::Error::AlertReceived(why)) => {
                        Fault::Denied(format!("{address} refuses the TLS handshake: {why:?}"))
                    }
                    _ => fault(&error),
                }
            })?;
        }
        stream.0.set_read_timeout(Some(lasting(STALL))).map_err(|error| fault(&error))?;
        let stream = StreamOwned::new(session, ReadAhead::new(stream));
        let channel = Encrypted { stream, encryption: leg.encryption };
        Ok(Box::new(HttpConnection::new(channel, leg, address, context)))
    }

    fn begins_with(&self, first: u8) -> bool {
        first == HANDSHAKE
    }

    fn accept(&self, incoming: Incoming, context: &Context) -> io::Result<Box<dyn Channel>> {
        accept(incoming.plain(), &context.tls)
    }
}

/// The client's end of a stream, which reads much at once: rustls alone reads 4 KiB at a time (its `READ_SIZE`).
struct ReadAhead(BufReader<Plain>);

impl ReadAhead {
    fn new(stream: Plain) -> ReadAhead {
        ReadAhead(BufReader::with_capacity(READ_AHEAD, stream))
    }
}

impl Read for ReadAhead {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.read(into)
    }
}

impl Write for ReadAhead {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.get_mut().write(bytes)
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.0.get_mut().write_vectored(slices)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.get_mut().flush()
    }
}

impl AsRef<Plain> for ReadAhead {
    fn as_ref(&self) -> &Plain {
        self.0.get_ref()
    }
}

/// A stream whose reads end at an absolute time, however small the pieces that arrive.
struct Until<'a> {
    stream: &'a mut Plain,
    end: Instant,
}

impl Read for Until<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.0.set_read_timeout(Some(left))?;
        self.stream.read(into)
    }
}

impl Write for Until<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// The server's half of the handshake; the client's hello names the kind of encryption.
fn accept(mut stream: Plain, settings: &TlsSettings) -> io::Result<Box<dyn Channel>> {
    let invalid = |error: &dyn std::fmt::Display| io::Error::new(io::ErrorKind::InvalidData, error.to_string());
    let mut acceptor = Acceptor::default();
    let accepted = loop {
        if acceptor.read_tls(&mut stream)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        match acceptor.accept() {
            Ok(Some(accepted)) => break accepted,
            Ok(None) => {}
            Err((error, mut alert)) => {
                alert.write_all(&mut stream)?;
                return Err(invalid(&error));
            }
        }
    };
    let (ends, encryption) = match (accepted.client_hello().server_name(), &settings.authenticated) {
        (Some(AUTHENTICATED), Some(ends)) => (ends, Encryption::Authenticated),
        (Some(OPPORTUNISTIC), _) => (&settings.opportunistic, Encryption::Opportunistic),
        (name, _) => return Err(invalid(&format!("nothing is served as {name:?}"))),
    };
    let mut session: ServerConnection =
        accepted.into_connection(ends.server.clone()).map_err(|(error, mut alert)| {
            let _ = alert.write_all(&mut stream);
            invalid(&error)
        })?;
    while session.is_handshaking() {
        session.complete_io(&mut stream)?;
    }
    Ok(Box::new(Encrypted { stream: StreamOwned::new(session, stream), encryption }))
}

struct Encrypted<S> {
    stream: S,
    encryption: Encryption,
}

/// Both ends of a session, as far as they are alike.
trait Session: Read + Write + Send {
    fn below(&self) -> &dyn Below;
    fn binding(&self) -> io::Result<Vec<u8>>;
    fn agreed(&self) -> String;
}

macro_rules! session {
    ($connection:ty, $stream:ty) => {
        impl Session for StreamOwned<$connection, $stream> {
            fn below(&self) -> &dyn Below {
                let plain: &Plain = self.sock.as_ref();
                plain
            }

            fn binding(&self) -> io::Result<Vec<u8>> {
                let binding = self.conn.export_keying_material([0; 32], EXPORTER, None);
                binding.map(Vec::from).map_err(|error| io::Error::other(format!("TLS: {error}")))
            }

            fn agreed(&self) -> String {
                let version = self.conn.protocol_version().and_then(|version| version.as_str());
                let suite = self.conn.negotiated_cipher_suite().and_then(|suite| suite.suite().as_str());
                format!("{} {}", version.unwrap_or("?"), suite.unwrap_or("?"))
            }
        }
    };
}
session!(ClientConnection, ReadAhead);
session!(ServerConnection, Plain);

impl<S: Session> Read for Encrypted<S> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.stream.read(into)
    }
}

impl<S: Session> Write for Encrypted<S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

impl<S: Session> Channel for Encrypted<S> {
    fn below(&self) -> &dyn Below {
        self.stream.below()
    }

    fn binding(&self) -> io::Result<Vec<u8>> {
        self.stream.binding()
    }

    fn encryption(&self) -> Encryption {
        self.encryption
    }

    fn tls(&self) -> Option<String> {
        Some(self.stream.agreed())
    }
}
