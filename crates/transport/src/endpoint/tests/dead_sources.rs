//! Sources that do not answer: what others send arrives meanwhile.

use super::*;
use socket2::{Domain, Socket, Type};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

const SOURCES: usize = 8;
/// Longer than this, a connect ends as not answered.
const LONGEST: Duration = Duration::from_secs(60);

/// An address that answers no more than a host that is gone: the queue of its listener is full, so the kernel drops
/// what asks for a connection.
struct Silent {
    address: SocketAddr,
    _listener: Socket,
    _waiting: Vec<TcpStream>,
}

impl Silent {
    fn new() -> Silent {
        let listener = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        listener.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        listener.listen(0).unwrap();
        let address = listener.local_addr().unwrap().as_socket().unwrap();
        let connect = || TcpStream::connect_timeout(&address, Duration::from_millis(50));
        let waiting = std::iter::from_fn(|| connect().ok()).take(8).collect::<Vec<_>>();
        assert!(waiting.len() < 8, "its queue takes one or two");
        Silent { address, _listener: listener, _waiting: waiting }
    }
}

/// R2: each attempt to connect to a dead host held a slot for 3 s, and none was left for the others.
#[test]
fn sources_that_do_not_answer_take_no_slot_from_those_that_do() {
    let token = crate::auth::random::<16>();
    let job = JobId::from("job");
    let demands = demand(Transport::Tcp, Encryption::None);
    let data = data();
    let owners: Vec<Endpoint> = (0..SOURCES).map(|_| endpoint(&token, u64::MAX, None)).collect();
    let silent: Vec<Silent> = (0..SOURCES).map(|_| Silent::new()).collect();
    let reader = endpoint(&token, u64::MAX, None);
    let asked = |part: Wanted, from: &str| {
        let mut asked = request(vec![part], demands);
        asked.transfer.from = from.into();
        asked
    };
    std::thread::scope(|threads| {
        let dead: Vec<_> = silent
            .iter()
            .enumerate()
            .map(|(number, own)| {
                let addresses = vec![own.address];
                let part = Wanted { object: ObjectId::random(), part: 0, len: 64 << 20, addresses };
                let (reader, asked) = (&reader, asked(part, &format!("dead {number}")));
                threads.spawn(move || reader.fetch(asked, || false).map(|_| ()))
            })
            .collect();
        let deadline = Instant::now() + LONGEST;
        // Of four slots: before, all of them connected.
        while reader.fetcher.connections().0 < 4 {
            assert!(Instant::now() < deadline, "they connect");
            std::thread::sleep(Duration::from_millis(1));
        }
        let live: Vec<_> = owners
            .iter()
            .enumerate()
            .map(|(number, owner)| {
                let object = owner.put(&[&data], &job, &demands).unwrap();
                let part = wanted(owner, object, 0, data.len() as u64);
                let (reader, data, asked) = (&reader, &data, asked(part, &format!("live {number}")));
                threads.spawn(move || reader.fetch(asked, || false).unwrap().parts[0].bytes() == data)
            })
            .collect();
        assert!(live.into_iter().all(|fetch| fetch.join().unwrap()), "every byte is right");
        for report in reader.fetcher.transfers() {
            let is_live = report.from.starts_with("live");
            assert_eq!(report.flows_peak > 0, is_live, "{} held {} slots", report.from, report.flows_peak);
            assert_eq!(report.served_bytes, if is_live { data.len() as u64 } else { 0 });
        }
        reader.fetcher.abandon();
        assert!(dead.into_iter().all(|fetch| fetch.join().unwrap().is_err()));
    });
}
