//! Whole endpoints of one process: parts arrive as they were put, over every carrier, whoever lies or is gone.

mod dead_sources;
mod one_host;

use super::*;
use crate::parts::Wanted;
use mission_core::flight::FlightPlan;
use mission_core::report::TransferReport;
use mission_core::types::{TransferId, Transport};
use std::collections::BTreeSet;
use std::net::TcpListener;

pub(crate) fn settings(token: &[u8], memory_limit: u64, identity: Option<Identity>) -> Settings {
    Settings {
        host: "127.0.0.1".parse().unwrap(),
        ports: vec![0],
        token: token.to_vec(),
        cluster: None,
        host_token: None,
        identity,
        requires_encryption: false,
        memory_limit,
        spool_folder: std::env::temp_dir(),
        flows_per_host: FlowsPerHost::Fixed(4),
        send_limit: None,
    }
}

fn endpoint(token: &[u8], memory_limit: u64, identity: Option<Identity>) -> Endpoint {
    Endpoint::new(settings(token, memory_limit, identity)).unwrap()
}

fn identity() -> Identity {
    let [identity] = identities();
    identity
}

/// Of one authority.
fn identities<const N: usize>() -> [Identity; N] {
    let key = rcgen::KeyPair::generate().unwrap();
    let mut authority = rcgen::CertificateParams::new([]).unwrap();
    authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let authority = rcgen::CertifiedIssuer::self_signed(authority, &key).unwrap();
    std::array::from_fn(|_| {
        let own_key = rcgen::KeyPair::generate().unwrap();
        let own = rcgen::CertificateParams::new(["somewhere.else".to_owned()])
            .unwrap()
            .signed_by(&own_key, &authority)
            .unwrap();
        Identity { ca: authority.pem().into(), certificate: own.pem().into(), key: own_key.serialize_pem().into() }
    })
}

fn wanted(endpoint: &Endpoint, object: ObjectId, part: u32, len: u64) -> Wanted {
    Wanted { object, part, len, addresses: vec![endpoint.address()] }
}

fn request(parts: Vec<Wanted>, demands: Demands) -> FetchRequest {
    let transfer = TransferId { job: "job".into(), from: "map".into(), to: "reduce".into() };
    FetchRequest { packed: true, whole: true, ..FetchRequest::new(transfer, demands, parts) }
}

fn demand(transport: Transport, encrypt: Encryption) -> Demands {
    Demands { encrypt, transport: Some(transport) }
}

/// Waits until `owner` knows of the others on its host.
fn met(owner: &Endpoint) {
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(5);
    while owner.fetcher.sharers(&"job".into(), &Demands::default()).is_none() {
        assert!(std::time::Instant::now() < deadline);
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// 9 MiB whose every byte depends on its place.
fn data() -> Vec<u8> {
    (0..9u32 << 20).map(|index| (index.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

#[test]
fn what_is_received_lies_in_memory_of_its_own_part_by_part_and_is_accounted_for_apart() {
    let data = data();
    let parts: [&[u8]; 4] = [&data, b"", &data[..100], &data[5..]];
    for demands in [demand(Transport::Tcp, Encryption::None), demand(Transport::Shm, Encryption::None)] {
        let (owner, reader) = (endpoint(b"receive", u64::MAX, None), endpoint(b"receive", u64::MAX, None));
        met(&owner);
        for (from, limit) in [(&owner, &reader), (&owner, &owner)] {
            let object = from.put(&parts, &"job".into(), &demands).unwrap();
            let wanted = |(part, own): (usize, &&[u8])| wanted(from, object, part as u32, own.len() as u64);
            let asked =
                FetchRequest { packed: false, ..request(parts.iter().enumerate().map(wanted).collect(), demands) };
            let received = limit.receive(asked, || false).unwrap();
            assert!(received.iter().zip(parts).all(|(segment, part)| segment.bytes() == part), "{demands:?}");
            owner.free(&object);
            assert_eq!((limit.pool.live_bytes(), owner.store.len()), (0, 0));
            let mut one = received.into_iter().next().unwrap();
            assert!(limit.pool.result_bytes() >= data.len() as u64);
            Arc::get_mut(&mut one).expect("nobody else has it").bytes_mut()[0] += 1;
            drop(one);
            assert_eq!(limit.pool.result_bytes(), 0);
        }
        let missing = wanted(&owner, ObjectId::random(), 0, 10);
        assert!(reader.receive(request(vec![missing], demands), || false).is_err());
        assert_eq!(reader.pool.result_bytes(), 0);
    }
}

#[test]
fn where_everything_is_encrypted_nothing_leaves_in_plain() {
    let [one, two] = identities();
    let strict = |identity| {
        let own = Settings { requires_encryption: true, ..settings(b"strict", u64::MAX, Some(identity)) };
        Endpoint::new(own).unwrap()
    };
    let (owner, reader) = (strict(one), strict(two));
    let object = owner.put(&[b"secret"], &"job".into(), &Demands::default()).unwrap();
    let got = reader.fetch(request(vec![wanted(&owner, object, 0, 6)], Demands::default()), || false).unwrap();
    assert_eq!(got.parts[0].bytes(), b"secret");
    let report = reader.fetcher.transfers();
    assert!(report[0].transport.bytes.keys().all(|transport| *transport == Transport::Tls), "{report:?}");
    let lax = endpoint(b"strict", u64::MAX, None);
    assert!(lax.fetch(request(vec![wanted(&owner, object, 0, 6)], Demands::default()), || false).is_err());
}

#[test]
fn parts_arrive_as_they_were_put_over_every_carrier_from_memory_and_spool() {
    let data = data();
    for memory_limit in [u64::MAX, 0] {
        for (transport, encrypt) in [
            (Transport::Tcp, Encryption::None),
            (Transport::Tls, Encryption::Opportunistic),
            (Transport::Tls, Encryption::Authenticated),
        ] {
            let identities = (encrypt == Encryption::Authenticated).then(identity);
            let again = identities.as_ref().map(|identity| Identity {
                ca: identity.ca.clone(),
                certificate: identity.certificate.clone(),
                key: identity.key.clone(),
            });
            let token = crate::auth::random::<16>();
            let owner = endpoint(&token, memory_limit, identities);
            let reader = endpoint(&token, u64::MAX, again);
            let id = owner.put(&[&data, b"", &data[..5]], &"job".into(), &demand(transport, encrypt)).unwrap();
            let parts =
                vec![wanted(&owner, id, 0, data.len() as u64), wanted(&owner, id, 1, 0), wanted(&owner, id, 2, 5)];
            let fetched = reader.fetch(request(parts, demand(transport, encrypt)), || false).unwrap();
            let part = |index: usize| fetched.parts[index].bytes();
            assert!(part(0) == data && part(1).is_empty() && part(2) == &data[..5], "{transport:?} {memory_limit}");
            let record = reader.fetcher.transfers().remove(0);
            assert_eq!(record.served_bytes, data.len() as u64 + 5);
            let agreed = record.transport.negotiated.first().unwrap();
            assert_eq!(agreed.authenticated, encrypt == Encryption::Authenticated);
            assert_eq!(agreed.tls.is_some(), transport == Transport::Tls);
            if let Some(tls) = &agreed.tls {
                assert_eq!(tls, "TLSv1_3 TLS13_AES_128_GCM_SHA256");
            }
        }
    }
}

#[test]
fn multipath_is_proved_by_the_socket() {
    if !carrier::transports().contains(&Transport::Mptcp) {
        return;
    }
    let token = crate::auth::random::<16>();
    let (owner, reader) = (endpoint(&token, u64::MAX, None), endpoint(&token, u64::MAX, None));
    let demands = demand(Transport::Mptcp, Encryption::None);
    let data = data();
    let id = owner.put(&[&data], &"job".into(), &demands).unwrap();
    let fetched = reader.fetch(request(vec![wanted(&owner, id, 0, data.len() as u64)], demands), || false);
    assert!(fetched.unwrap().parts[0].bytes() == data);
    let facts = reader.fetcher.transfers().remove(0).transport;
    assert_eq!(facts.bytes[&Transport::Mptcp], data.len() as u64);
    assert!(facts.fallbacks.is_empty(), "{facts:?}");
    assert!(
        facts.negotiated.iter().all(|negotiated| negotiated.transport == "mptcp" && negotiated.subflows == Some(1)),
        "{facts:?}"
    );
}

/// Informs a reader that its next fetch is a broadcast.
fn announce(reader: &Endpoint) {
    let transfer = request(Vec::new(), Demands::default()).transfer;
    reader.fetcher.command(mission_core::mission::Command::Broadcast { transfer });
}

#[test]
fn receivers_of_a_broadcast_serve_one_another_and_keep_what_they_got() {
    let data: Vec<u8> = [data(), data()].concat();
    for (transport, encrypt) in [(Transport::Tcp, Encryption::None), (Transport::Tls, Encryption::Opportunistic)] {
        let token = crate::auth::random::<16>();
        let (owner, demands) = (endpoint(&token, u64::MAX, None), demand(transport, encrypt));
        let readers: Vec<_> = (0..6).map(|_| endpoint(&token, u64::MAX, None)).collect();
        let id = owner.put(&[&data], &"job".into(), &demands).unwrap();
        let parts = || vec![wanted(&owner, id, 0, data.len() as u64)];
        readers.iter().for_each(announce);
        std::thread::scope(|scope| {
            // Two tasks of each: the second waits for what the first receives.
            for reader in readers.iter().chain(&readers) {
                scope.spawn(|| {
                    let fetched = reader.fetch(request(parts(), demands), || false).unwrap();
                    assert!(fetched.parts[0].bytes() == data);
                });
            }
        });
        let peers: u64 = readers.iter().map(|reader| reader.fetcher.transfers()[0].peer_bytes).sum();
        let sent = sent_once(&owner, 6 * data.len() as u64 - peers);
        assert_eq!(peers + sent, 6 * data.len() as u64);
        let copies = sent as f64 / data.len() as f64;
        assert!((1.0..3.0).contains(&copies), "{copies} copies left the owner");
        // The owner is gone, and every reader still has it.
        drop(owner);
        for reader in &readers {
            assert_eq!((reader.resources().copies, reader.store.copies.news()), (1, vec![id]));
            reader.free(&id);
            assert_eq!(reader.resources().live_bytes, 0);
        }
    }
}

/// Return what an endpoint has sent, once it has counted `bytes`: its reader may have the last chunk before that.
fn sent_once(owner: &Endpoint, bytes: u64) -> u64 {
    let until = std::time::Instant::now() + std::time::Duration::from_secs(30);
    while owner.resources().sent_bytes < bytes && std::time::Instant::now() < until {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    owner.resources().sent_bytes
}

#[test]
fn what_a_reader_said_to_keep_comes_once_and_goes_when_there_is_no_room() {
    let token = crate::auth::random::<16>();
    let (owner, reader) = (endpoint(&token, u64::MAX, None), endpoint(&token, 20 << 20, None));
    let demands = demand(Transport::Tcp, Encryption::None);
    let parts: Vec<Vec<u8>> = (0..3).map(|part| data()[part * (1 << 20)..].to_vec()).collect();
    let id = owner.put(&parts.iter().map(|part| &**part).collect::<Vec<_>>(), &"job".into(), &demands).unwrap();
    let fetch = |part: usize, keep: bool| {
        let own = vec![wanted(&owner, id, part as u32, parts[part].len() as u64)];
        let keep = if keep { BTreeSet::from([id]) } else { BTreeSet::new() };
        let asked = FetchRequest { packed: false, whole: false, keep, ..request(own, demands) };
        let fetched = reader.fetch(asked, || false).unwrap();
        assert!(fetched.parts[0].bytes() == parts[part]);
        reader.resources().copies
    };
    assert_eq!(fetch(0, false), 0);
    let before = sent_once(&owner, parts[0].len() as u64);
    assert_eq!([fetch(0, true), fetch(0, true), fetch(1, true), fetch(1, true)], [1, 1, 2, 2]);
    let both = (parts[0].len() + parts[1].len()) as u64;
    assert_eq!(sent_once(&owner, before + both) - before, both);
    // There is room for two of them at most.
    assert!(fetch(2, true) <= 2 && fetch(2, true) <= 2);
    assert_eq!(reader.store.copies.news(), [id, id, id]);
    reader.free(&id);
    assert_eq!((reader.resources().copies, reader.resources().live_bytes), (0, 0));
}

/// A range that waited for all of its bytes to be allowed was silent for so long that its receiver asked again, and what
/// was booked for the first one counted all the same.
#[test]
fn under_a_send_limit_no_range_is_silent_until_its_receiver_asks_again() {
    let data = data();
    for memory_limit in [u64::MAX, 0] {
        // The third chunk of 4 MiB was silent for longer than a stall (5 s).
        let limited = Settings { send_limit: Some(3 << 19), ..settings(b"limit", memory_limit, None) };
        let (owner, reader) = (Endpoint::new(limited).unwrap(), endpoint(b"limit", u64::MAX, None));
        let demands = demand(Transport::Tcp, Encryption::None);
        let id = owner.put(&[&data], &"job".into(), &demands).unwrap();
        let got = reader.fetch(request(vec![wanted(&owner, id, 0, 9 << 20)], demands), || false).unwrap();
        assert!(got.parts[0].bytes() == data);
        assert_eq!(got.tally.resumed, 0);
    }
}

#[test]
fn strangers_that_say_nothing_keep_nobody_out() {
    let token = crate::auth::random::<16>();
    let (owner, reader) = (endpoint(&token, u64::MAX, None), endpoint(&token, u64::MAX, None));
    let demands = demand(Transport::Tcp, Encryption::None);
    let id = owner.put(&[&data()], &"job".into(), &demands).unwrap();
    let fetch = || reader.fetch(request(vec![wanted(&owner, id, 0, 9 << 20)], demands), || false).unwrap().tally;
    fetch();
    // Silent strangers do not displace clients, and their number is limited.
    let most = mission_core::defaults::UNADMITTED_CONNECTIONS;
    let _idle: Vec<_> = (0..4 * most).map(|_| std::net::TcpStream::connect(owner.address()).unwrap()).collect();
    while owner.resources().serving_connections < most {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    assert_eq!(fetch().busy, 0);
    // With the reader's own, and those that were just accepted.
    assert!(owner.resources().serving_connections <= most + 32, "{}", owner.resources().serving_connections);
}

/// It was refused, and the task that fetched it failed for good.
#[test]
fn where_shared_memory_is_demanded_an_object_that_is_gone_is_lost() {
    let token = crate::auth::random::<16>();
    let (owner, reader) = (endpoint(&token, u64::MAX, None), endpoint(&token, u64::MAX, None));
    met(&owner);
    let demands = demand(Transport::Shm, Encryption::None);
    let [freed, gone] = [(); 2].map(|()| owner.put(&[&data()], &"job".into(), &demands).unwrap());
    let wanted = |id| wanted(&owner, id, 0, 9 << 20);
    let parts = [freed, gone].map(wanted);
    let fetch = |part: &Wanted| reader.fetch(request(vec![part.clone()], demands), || false);
    assert!(fetch(&parts[0]).unwrap().parts[0].bytes() == data());
    owner.store.free(&freed);
    assert!(matches!(fetch(&parts[0]).err(), Some(FetchError::Lost(_))));
    drop(owner);
    std::thread::scope(|scope| {
        let fetched = scope.spawn(|| fetch(&parts[1]).err());
        // Word of it comes later than its sockets break.
        std::thread::sleep(std::time::Duration::from_millis(300));
        reader.fetcher.lost(&[gone], "its worker left");
        assert!(matches!(fetched.join().unwrap(), Some(FetchError::Lost(why)) if why == "its worker left"));
    });
}

/// Another part of its slab stayed mapped meanwhile.
#[test]
fn a_part_to_which_its_owner_could_write_is_verified_again() {
    use std::os::unix::fs::FileExt;
    let token = crate::auth::random::<16>();
    let (owner, reader) = (endpoint(&token, u64::MAX, None), endpoint(&token, u64::MAX, None));
    met(&owner);
    let (demands, small) = (demand(Transport::Shm, Encryption::None), &data()[..300_000]);
    let [kept, changed] = [(); 2].map(|()| owner.put(&[small], &"job".into(), &demands).unwrap());
    let fetch = |id| {
        let parts = vec![wanted(&owner, id, 0, small.len() as u64)];
        reader.fetch(FetchRequest { packed: false, whole: false, ..request(parts, demands) }, || false)
    };
    let keeps = fetch(kept).unwrap();
    assert!(fetch(changed).unwrap().parts[0].bytes() == small);
    let object = owner.store.get(&changed).unwrap();
    let (segment, start, _) = object.in_memory(0).unwrap();
    let other: Vec<u8> = small[..8].iter().map(|byte| !byte).collect();
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(5);
    while segment.leases() > 0 {
        assert!(std::time::Instant::now() < deadline, "the lease never came back");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    // By way of the kernel, which refuses it for as long as the memory is read-only; as where so many parts are.
    let memory = std::fs::File::options().write(true).open("/proc/self/mem").unwrap();
    let place = segment.as_ptr() as u64 + start;
    memory.write_at(&other, place).expect_err("its memory stays read-only while few parts are");
    segment.make_writable();
    memory.write_at(&other, place).unwrap();
    let why = fetch(changed).err().unwrap().to_string();
    assert!(why.contains("checksum"), "{why}");
    assert!(keeps.parts[0].bytes() == small);
}

#[test]
fn a_broadcast_goes_on_without_a_receiver_that_has_given_up_its_copy() {
    let token = crate::auth::random::<16>();
    let owner = endpoint(&token, u64::MAX, None);
    let (first, second) = (endpoint(&token, u64::MAX, None), endpoint(&token, u64::MAX, None));
    let data = data();
    let demands = demand(Transport::Tcp, Encryption::None);
    let id = owner.put(&[&data], &"job".into(), &demands).unwrap();
    for reader in [&first, &second] {
        announce(reader);
        let fetched = reader.fetch(request(vec![wanted(&owner, id, 0, data.len() as u64)], demands), || false);
        assert!(fetched.unwrap().parts[0].bytes() == data);
        reader.fetcher.forget_job(&"job".into());
    }
    assert_eq!(second.resources().copies, 0);
}

/// It knows the token, and serves its own bytes with checksums that fit them.
#[test]
fn a_receiver_that_serves_other_bytes_deceives_nobody() {
    let deceived = || {
        let token = crate::auth::random::<16>();
        let owner = endpoint(&token, u64::MAX, None);
        let (poisoner, reader) = (endpoint(&token, u64::MAX, None), endpoint(&token, u64::MAX, None));
        let (data, demands) = (data(), demand(Transport::Tcp, Encryption::None));
        let id = owner.put(&[&data], &"job".into(), &demands).unwrap();
        let parts = || vec![wanted(&owner, id, 0, data.len() as u64)];
        announce(&poisoner);
        drop(poisoner.fetch(request(parts(), demands), || false).unwrap());
        let (segment, start, len) = poisoner.store.copies.whole(&(id, 0)).unwrap();
        // SAFETY: nobody reads the copy now; that nobody may write to it is what is broken here.
        let bytes = unsafe { std::slice::from_raw_parts_mut(segment.as_ptr().add(start), len) };
        bytes.fill(0x66);
        let copy = poisoner.store.copies.get(&(id, 0)).unwrap();
        copy.arrived(0, &crate::checksum::of_blocks(bytes));
        announce(&reader);
        let fetched = reader.fetch(request(parts(), demands), || false).unwrap();
        assert!(fetched.parts[0].bytes() == data);
        assert_eq!(reader.fetcher.transfers()[0].peer_bytes, 0, "nothing of it was taken");
        fetched.tally.refetches
    };
    // One time in ten the owner does not know yet what the other one has, and sends all of it itself.
    assert!((0..10).any(|_| deceived() > 0), "the reader was never sent to it");
}

#[test]
fn a_broadcast_whose_owner_has_freed_it_is_lost() {
    let token = crate::auth::random::<16>();
    let (owner, reader) = (endpoint(&token, u64::MAX, None), endpoint(&token, u64::MAX, None));
    let id = owner.put(&[&data()], &"job".into(), &Demands::default()).unwrap();
    owner.store.free(&id);
    announce(&reader);
    let lost = reader.fetch(request(vec![wanted(&owner, id, 0, 9 << 20)], Demands::default()), || false);
    assert!(matches!(lost.err(), Some(FetchError::Lost(_))));
    assert_eq!((reader.resources().copies, reader.resources().live_bytes), (0, 0));
}

#[test]
fn a_client_without_the_token_gets_nothing() {
    let owner = endpoint(b"right", u64::MAX, None);
    let id = owner.put(&[b"secret"], &"job".into(), &Demands::default()).unwrap();
    let stranger = endpoint(b"wrong", u64::MAX, None);
    for transport in [Transport::Tcp, Transport::Tls] {
        let parts = vec![wanted(&owner, id, 0, 6)];
        let refused = stranger.fetch(request(parts, demand(transport, Encryption::None)), || false).err().unwrap();
        assert!(matches!(&refused, FetchError::Denied(why) if why.contains("token")), "{refused}");
        stranger.fetcher.forget_job(&"job".into());
    }
}

#[test]
fn certificates_of_another_cluster_are_refused() {
    let owner = endpoint(b"token", u64::MAX, Some(identity()));
    let id = owner.put(&[b"secret"], &"job".into(), &demand(Transport::Tls, Encryption::Authenticated)).unwrap();
    let stranger = endpoint(b"token", u64::MAX, Some(identity()));
    let parts = vec![wanted(&owner, id, 0, 6)];
    let refused = stranger.fetch(request(parts, demand(Transport::Tls, Encryption::Authenticated)), || false);
    assert!(matches!(refused.err(), Some(FetchError::Denied(_))));
}

/// A certificate of their common authority admits nobody.
#[test]
fn clusters_of_one_authority_are_told_apart_by_their_tokens() {
    let [one, two, three] = identities();
    let demands = || demand(Transport::Tls, Encryption::Authenticated);
    let owner = endpoint(b"a token", u64::MAX, Some(one));
    let id = owner.put(&[b"secret"], &"job".into(), &demands()).unwrap();
    let parts = || vec![wanted(&owner, id, 0, 6)];
    let stranger = endpoint(b"another token", u64::MAX, Some(two));
    let refused = stranger.fetch(request(parts(), demands()), || false);
    assert!(matches!(refused.err(), Some(FetchError::Denied(_))));
    let neighbour = endpoint(b"a token", u64::MAX, Some(three));
    assert!(neighbour.fetch(request(parts(), demands()), || false).is_ok());
}

/// With several interfaces it listens on all addresses, and serves connections to its own alone.
#[test]
fn an_address_of_another_machine_is_refused() {
    let elsewhere = Settings { host: "192.0.2.1".parse().unwrap(), ..settings(b"token", u64::MAX, None) };
    assert!(Endpoint::new(elsewhere).is_err());
}

#[test]
fn it_serves_at_the_first_of_its_ports_that_is_free() {
    // Of two ports that were free just now.
    let free = || TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let ports = vec![free(), free()];
    let with = |ports: &[u16]| Settings { ports: ports.to_vec(), ..settings(b"token", u64::MAX, None) };
    let one = Endpoint::new(with(&ports)).unwrap();
    let two = Endpoint::new(with(&ports)).unwrap();
    assert_eq!([one.address().port(), two.address().port()], ports[..]);
    let refused = Endpoint::new(with(&ports)).err().unwrap();
    assert_eq!(refused.kind(), io::ErrorKind::AddrInUse);
    assert!(refused.to_string().contains(&ports[0].to_string()), "{refused}");
    // It is free again although a connection to it has just ended.
    let id = one.put(&[b"secret"], &"job".into(), &Demands::default()).unwrap();
    let parts = vec![wanted(&one, id, 0, 6)];
    two.fetch(request(parts, demand(Transport::Tcp, Encryption::None)), || false).unwrap();
    drop(one);
    assert_eq!(Endpoint::new(with(&ports)).unwrap().address().port(), ports[0]);
}

#[test]
fn an_object_that_must_be_encrypted_does_not_leave_in_the_clear() {
    let token = crate::auth::random::<16>();
    let (owner, reader) = (endpoint(&token, u64::MAX, None), endpoint(&token, u64::MAX, None));
    let id = owner.put(&[b"secret"], &"job".into(), &demand(Transport::Tls, Encryption::Opportunistic)).unwrap();
    let parts = vec![wanted(&owner, id, 0, 6)];
    let refused = reader.fetch(request(parts, demand(Transport::Tcp, Encryption::None)), || false).err().unwrap();
    assert!(matches!(&refused, FetchError::Denied(why) if why.contains("encrypted")), "{refused}");
}

#[test]
fn what_is_freed_is_lost_to_readers_and_its_memory_comes_back() {
    let token = crate::auth::random::<16>();
    let (owner, reader) = (endpoint(&token, u64::MAX, None), endpoint(&token, u64::MAX, None));
    let id = owner.put(&[&data()], &"job".into(), &Demands::default()).unwrap();
    assert!(owner.store.free(&id));
    let parts = vec![wanted(&owner, id, 0, 9 << 20)];
    let lost = reader.fetch(request(parts, Demands::default()), || false).err().unwrap();
    assert!(matches!(lost, FetchError::Lost(_)), "{lost}");
    assert_eq!((owner.resources().live_bytes, reader.resources().live_bytes), (0, 0));
}

#[test]
fn many_callers_share_the_slots_of_their_host() {
    let token = crate::auth::random::<16>();
    let (owner, reader) = (endpoint(&token, u64::MAX, None), endpoint(&token, u64::MAX, None));
    let data = data();
    let id = owner.put(&[&data], &"job".into(), &Demands::default()).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let parts = vec![wanted(&owner, id, 0, data.len() as u64)];
                let fetched = reader.fetch(request(parts, Demands::default()), || false).unwrap();
                assert!(fetched.parts[0].bytes() == data);
            });
        }
    });
    let record = reader.fetcher.transfers().remove(0);
    assert!(record.flows_peak <= 4 && record.flows == 0, "{record:?}");
    assert_eq!(record.served_bytes, 8 * data.len() as u64);
}

#[test]
fn an_interrupted_fetch_ends_and_says_so() {
    let reader = endpoint(b"token", u64::MAX, None);
    // No process listens there: the fetch would retry until its timeout.
    let parts =
        vec![Wanted { object: ObjectId([1; 16]), part: 0, len: 5, addresses: vec!["127.0.0.1:1".parse().unwrap()] }];
    let reader = &reader;
    let ended = std::thread::scope(|scope| {
        // The answering side may wait for a thread that requests something from this process.
        let others_go_on = || {
            let (done, result) = std::sync::mpsc::channel();
            scope.spawn(move || done.send(reader.fetcher.transfers()));
            result.recv_timeout(std::time::Duration::from_secs(2)).is_ok()
        };
        reader.fetch(request(parts, Demands::default()), others_go_on).err().unwrap()
    });
    assert!(matches!(ended, FetchError::Cancelled(_)), "{ended}");
}

#[test]
fn a_transport_is_replaced_at_half_of_a_transfer_and_nothing_is_lost_or_comes_twice() {
    use mission_core::flight::{Leg, Reach};
    let token = crate::auth::random::<16>();
    // So slow that the second half is still to come when the other thread gets its turn on a busy machine.
    let slow = Settings { send_limit: Some(64 << 20), ..settings(&token, u64::MAX, None) };
    let (owner, reader) = (Endpoint::new(slow).unwrap(), endpoint(&token, u64::MAX, None));
    let job = JobId::from("job");
    let data: Vec<u8> = data().iter().cycle().take(64 << 20).copied().collect();
    let id = owner.put(&[&data], &job, &demand(Transport::Tcp, Encryption::None)).unwrap();
    let plan = |transport, encryption| {
        let (reach, reason) = (Reach::Anywhere, "the test says so".to_owned());
        let leg = Leg {
            transport,
            reach,
            encryption,
            congestion_control: None,
            rto_min_us: None,
            subflows: None,
            reason,
            except: None,
        };
        let plan = FlightPlan { demands: Demands::default(), legs: vec![leg], chunk_bytes: 1 << 20, refused: vec![] };
        mission_core::mission::Command::Plan { job: job.clone(), plan }
    };
    reader.fetcher.command(plan(Transport::Tcp, Encryption::None));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while reader.fetcher.transfers().first().is_none_or(|first| first.served_bytes < 24 << 20) {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            reader.fetcher.command(plan(Transport::Tls, Encryption::Opportunistic));
        });
        let parts = vec![wanted(&owner, id, 0, data.len() as u64)];
        let fetched = reader.fetch(request(parts, Demands::default()), || false).unwrap();
        assert!(fetched.parts[0].bytes() == data);
        assert_eq!((fetched.tally.bytes, fetched.tally.refetches), (data.len() as u64, 0));
    });
    let record = reader.fetcher.transfers().remove(0);
    assert_eq!(record.served_bytes, data.len() as u64);
    let carried = &record.transport.bytes;
    assert_eq!(carried.values().sum::<u64>(), data.len() as u64);
    assert!(carried.len() == 2, "{carried:?}");
}

/// R3: a record of each transfer stayed as long as its job.
#[test]
fn a_transfer_that_is_quiet_is_reported_a_last_time_and_forgotten() {
    let token = crate::auth::random::<16>();
    let demands = demand(Transport::Tcp, Encryption::None);
    let (owner, reader) = (endpoint(&token, u64::MAX, None), endpoint(&token, u64::MAX, None));
    let object = owner.put(&[&[7; 1000]], &"job".into(), &demands).unwrap();
    let fetch = || reader.fetch(request(vec![wanted(&owner, object, 0, 1000)], demands), || false).unwrap();
    let reported = || {
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        let mut all = Vec::new();
        while !all.last().is_some_and(|last: &TransferReport| last.over) {
            assert!(std::time::Instant::now() < deadline, "it is forgotten");
            if reader.fetcher.has_news() {
                all.extend(reader.fetcher.report().unwrap_or_default());
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        all
    };
    fetch();
    let first = reported();
    assert!(first.iter().all(|own| own.served_bytes == 1000) && !first[first.len() - 2].moved, "{first:?}");
    assert!(reader.fetcher.transfers().is_empty() && reader.fetcher.report().is_none());
    // It begins anew.
    fetch();
    let second = reported();
    assert_eq!(second.last().unwrap().served_bytes, 1000);
    assert!(second.last().unwrap().started > first.last().unwrap().ended);
}
