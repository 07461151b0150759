//! The least that moves an object over TLS 1.3 with rustls: the baseline of `mission bench transfer`.
//!
//! `rustls_loop serve CC` prints its port; `rustls_loop fetch PORT BYTES FLOWS ROUNDS CC` prints seconds, a line a round.
//! A request is where the range starts and how long it is. Both ends use the same kind of memory as Mission Control:
//! with pages of 4 KiB this loop is a third slower, and flatters whatever is compared with it.

use mission_transport::segment::{Pool, Segment};
use mission_transport::socket::set_congestion_control;
use mission_transport::tls::{OPPORTUNISTIC, TlsSettings};
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, ServerConnection, StreamOwned};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Instant;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let number = |index: usize| words[index].parse::<usize>().expect("a number");
    match words[0].as_str() {
        "serve" => serve(&words[1]),
        _ => fetch(number(1) as u16, number(2), number(3), number(4), &words[5]),
    }
}

fn serve(cc: &str) {
    let settings = TlsSettings::new(None).expect("settings without certificates");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    println!("{}", listener.local_addr().expect("bound").port());
    let content: &'static [u8] = Box::leak(Box::new(memory(256 << 20, 7))).bytes();
    for stream in listener.incoming().flatten() {
        let session = ServerConnection::new(settings.opportunistic.server.clone()).expect("settings fit");
        stream.set_nodelay(true).expect("a socket");
        set_congestion_control(&stream, cc).expect("allowed");
        std::thread::spawn(move || {
            let mut stream = StreamOwned::new(session, stream);
            let mut request = [0; 16];
            while stream.read_exact(&mut request).is_ok() {
                let [start, bytes] = [&request[..8], &request[8..]]
                    .map(|word| u64::from_ne_bytes(word.try_into().expect("8 bytes")) as usize);
                if stream.write_all(&content[start..start + bytes]).and_then(|()| stream.flush()).is_err() {
                    break;
                }
            }
        });
    }
}

fn fetch(port: u16, bytes: usize, flows: usize, rounds: usize, cc: &str) {
    let settings = TlsSettings::new(None).expect("settings without certificates");
    let mut streams: Vec<_> = (0..flows)
        .map(|_| {
            let stream = TcpStream::connect(("127.0.0.1", port)).expect("it listens");
            stream.set_nodelay(true).expect("a socket");
            set_congestion_control(&stream, cc).expect("allowed");
            let name = ServerName::try_from(OPPORTUNISTIC).expect("a name");
            StreamOwned::new(
                ClientConnection::new(settings.opportunistic.client.clone(), name).expect("settings fit"),
                stream,
            )
        })
        .collect();
    let mut into = memory(bytes, 1);
    let part = bytes.div_ceil(flows);
    for round in 0..=rounds {
        let began = Instant::now();
        std::thread::scope(|scope| {
            for ((number, into), stream) in into.bytes_mut().chunks_mut(part).enumerate().zip(&mut streams) {
                scope.spawn(move || {
                    let request = [number * part, into.len()].map(|word| (word as u64).to_ne_bytes());
                    stream.write_all(request.as_flattened()).expect("sent");
                    stream.read_exact(into).expect("received");
                });
            }
        });
        if round > 0 {
            println!("{:.9}", began.elapsed().as_secs_f64());
        }
    }
}

fn memory(bytes: usize, content: u8) -> Segment {
    let mut segment = Pool::new(0).take(bytes, None).expect("memory");
    segment.bytes_mut().fill(content);
    segment
}
