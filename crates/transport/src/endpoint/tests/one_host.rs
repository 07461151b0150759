//! What processes of one host share: memory and spool files, under leases.

use super::*;

/// Waits until leases have been returned, as `is_so` says.
fn returned(is_so: impl Fn() -> bool) {
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(5);
    while !is_so() {
        assert!(std::time::Instant::now() < deadline, "the owner hears that leases have ended");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

#[test]
fn what_a_neighbour_has_in_memory_is_read_where_it_lies_and_cannot_change_meanwhile() {
    let token = crate::auth::random::<16>();
    let (owner, reader) = (endpoint(&token, u64::MAX, None), endpoint(&token, u64::MAX, None));
    met(&owner);
    let (job, demands) = (JobId::from("job"), Demands::default());
    let data = data();
    let id = owner.put(&[&data, &data[..100]], &job, &demands).unwrap();
    let parts = || vec![wanted(&owner, id, 0, data.len() as u64), wanted(&owner, id, 1, 100)];
    let apart = FetchRequest { packed: false, ..request(parts(), demands) };
    let fetched = reader.fetch(apart, || false).unwrap();
    assert!(fetched.parts[0].bytes() == data && fetched.parts[1].bytes() == &data[..100]);
    let record = reader.fetcher.transfers().remove(0);
    assert_eq!(record.transport.bytes[&Transport::Shm], data.len() as u64 + 100);
    assert!(record.transport.negotiated.first().unwrap().memory.is_some() && record.transport.fallbacks.is_empty());
    // The owner frees it and puts the next: the reader's view stays as it was.
    let live = owner.resources().live_bytes;
    assert!(owner.store.free(&id));
    let other = owner.put(&[&vec![0; data.len() + 100]], &job, &demands).unwrap();
    assert!(fetched.parts[0].bytes() == data);
    assert_eq!(owner.resources().live_bytes, 2 * live);
    // Once it is given back the memory is used again.
    drop(fetched);
    assert!(owner.store.free(&other));
    returned(|| owner.resources().live_bytes == 0);
    let again = owner.put(&[&data], &job, &demands).unwrap();
    let packed = reader.fetch(request(vec![wanted(&owner, again, 0, data.len() as u64)], demands), || false);
    assert!(packed.unwrap().all.unwrap().bytes() == data);
}

#[test]
fn what_a_neighbour_has_in_its_spool_is_read_there() {
    let token = crate::auth::random::<16>();
    let (owner, reader) = (endpoint(&token, 0, None), endpoint(&token, u64::MAX, None));
    met(&owner);
    let (job, demands) = (JobId::from("job"), Demands::default());
    let data = data();
    let id = owner.put(&[&data, &data[..100]], &job, &demands).unwrap();
    let parts = || vec![wanted(&owner, id, 1, 100), wanted(&owner, id, 0, data.len() as u64)];
    let expected = [&data[..100], &data];
    for packed in [false, true] {
        let fetched = reader.fetch(FetchRequest { packed, ..request(parts(), demands) }, || false).unwrap();
        assert!(fetched.parts.iter().zip(expected).all(|(part, own)| part.bytes() == own));
    }
    let received = reader.fetcher.receive(request(parts(), demands), || false).unwrap();
    assert!(received.iter().zip(expected).all(|(part, own)| part.bytes() == own));
    let shm_alone = Demands { transport: Some(Transport::Shm), ..demands };
    assert!(reader.fetch(request(parts(), shm_alone), || false).unwrap().parts[1].bytes() == data);
    let facts = reader.fetcher.transfers().remove(0).transport;
    assert_eq!(facts.bytes[&Transport::Shm], 4 * (data.len() as u64 + 100));
    assert!(facts.bytes.len() == 1 && facts.fallbacks.is_empty(), "{facts:?}");
    assert!(facts.negotiated.iter().any(|own| own.memory.as_ref().unwrap().contains("spool")), "{facts:?}");
    // Its place is free again once it is given back.
    assert!(owner.store.free(&id));
    returned(|| owner.resources().spooled_bytes == 0);
}

#[test]
fn a_spool_that_is_damaged_gives_no_data_however_it_is_read() {
    let token = crate::auth::random::<16>();
    let (owner, reader) = (endpoint(&token, 0, None), endpoint(&token, u64::MAX, None));
    met(&owner);
    let data = data();
    let id = owner.put(&[&data], &JobId::from("job"), &Demands::default()).unwrap();
    let object = owner.store.get(&id).unwrap();
    let crate::store::Body::Spooled(range) = object.body() else { panic!("it lies in the spool") };
    range.overwrite(data.len() as u64 - 1, &[data[data.len() - 1] ^ 1]);
    for transport in [None, Some(Transport::Shm)] {
        let parts = vec![wanted(&owner, id, 0, data.len() as u64)];
        let demands = Demands { transport, ..Demands::default() };
        let error = reader.fetch(request(parts, demands), || false).err().unwrap();
        assert!(error.to_string().contains("checksum"), "{error}");
    }
}

#[test]
fn one_fetch_takes_what_lies_in_many_files_and_the_rest_another_way() {
    let token = crate::auth::random::<16>();
    let demands = Demands::default();
    let owners = [endpoint(&token, u64::MAX, None), endpoint(&token, 1 << 20, None)];
    let reader = endpoint(&token, u64::MAX, None);
    owners.iter().for_each(met);
    let content = |number: usize| {
        let mut own = vec![number as u8; 70_000 + number];
        own[..8].copy_from_slice(&number.to_le_bytes());
        own
    };
    // Each job has a memory file of its own; some objects are too small to be shared, and some are private to their worker.
    let put = |number: usize| {
        let (owner, job) = (&owners[number % 2], JobId::from(format!("job {}", number % 75).as_str()));
        let (data, private) = (content(number), number % 10 == 9);
        let demands = if private { demand(Transport::Tcp, Encryption::None) } else { demands };
        let len = if number % 10 == 8 { 1000 } else { data.len() };
        let id = owner.put(&[&data[..len], &data[..10]], &job, &demands).unwrap();
        [wanted(owner, id, 0, len as u64), wanted(owner, id, 1, 10)]
    };
    let parts: Vec<Wanted> = (0..300).flat_map(put).filter(|wanted| wanted.len > 0).collect();
    assert!(owners[1].resources().spooled_bytes > 0);
    let fetched = reader.fetch(FetchRequest { packed: false, ..request(parts.clone(), demands) }, || false).unwrap();
    for (number, (part, wanted)) in fetched.parts.iter().zip(&parts).enumerate() {
        assert!(part.bytes() == &content(number / 2)[..wanted.len as usize], "{number}");
    }
    let facts = reader.fetcher.transfers().remove(0).transport;
    let shared = facts.bytes[&Transport::Shm];
    assert!(shared > 200 * 70_000 && facts.bytes[&Transport::Tcp] > 30 * 70_000, "{facts:?}");
    assert_eq!(facts.bytes.values().sum::<u64>(), parts.iter().map(|wanted| wanted.len).sum::<u64>());
    // One of them is gone: the fetch reports that.
    owners[0].store.free(&parts[0].object);
    let error = reader.fetch(request(parts, demands), || false).err().unwrap();
    assert!(matches!(error, FetchError::Lost(_)), "{error}");
}

#[test]
fn an_object_of_more_parts_than_one_answer_carries_comes_in_several() {
    let token = crate::auth::random::<16>();
    for limit in [u64::MAX, 0] {
        let (owner, reader) = (endpoint(&token, limit, None), endpoint(&token, u64::MAX, None));
        met(&owner);
        let contents: Vec<Vec<u8>> = (0..10_000u32).map(|number| number.to_le_bytes().repeat(5)).collect();
        let refs: Vec<&[u8]> = contents.iter().map(Vec::as_slice).collect();
        let (job, demands) = (JobId::from("job"), Demands::default());
        let ids = [owner.put(&refs, &job, &demands).unwrap(), owner.put(&refs[..5000], &job, &demands).unwrap()];
        let order: Vec<(usize, u32)> =
            (0..10_000).map(|part| (0, part)).chain((0..5000).map(|part| (1, part))).collect();
        let parts = order.iter().map(|(object, part)| wanted(&owner, ids[*object], *part, 20)).collect();
        let fetched = reader.fetch(FetchRequest { packed: false, ..request(parts, demands) }, || false).unwrap();
        let expected = order.iter().map(|(_, part)| &contents[*part as usize]);
        assert!(fetched.parts.iter().zip(expected).all(|(part, own)| part.bytes() == own));
        let facts = reader.fetcher.transfers().remove(0).transport;
        assert_eq!(facts.bytes, [(Transport::Shm, 15_000 * 20)].into(), "{facts:?}");
    }
}

#[test]
fn a_part_that_is_kept_keeps_its_own_object_and_no_other_of_the_same_fetch() {
    let token = crate::auth::random::<16>();
    let (owner, reader) = (endpoint(&token, u64::MAX, None), endpoint(&token, u64::MAX, None));
    met(&owner);
    let (job, demands) = (JobId::from("job"), Demands::default());
    let ids: Vec<ObjectId> =
        (0..8u8).map(|number| owner.put(&[&vec![number; 1 << 20]], &job, &demands).unwrap()).collect();
    let parts = ids.iter().map(|id| wanted(&owner, *id, 0, 1 << 20)).collect();
    let fetched = reader.fetch(FetchRequest { packed: false, ..request(parts, demands) }, || false).unwrap();
    let kept = fetched.parts[3].clone();
    drop(fetched);
    assert!(ids.iter().all(|id| owner.store.free(id)));
    returned(|| owner.resources().live_bytes <= 1 << 20);
    assert!(kept.bytes().iter().all(|byte| *byte == 3));
    assert_eq!(owner.resources().live_bytes, 1 << 20);
}

#[test]
fn what_is_refused_takes_no_room_from_the_rest_of_the_answer() {
    let token = crate::auth::random::<16>();
    let (owner, reader) = (endpoint(&token, u64::MAX, None), endpoint(&token, u64::MAX, None));
    met(&owner);
    let (job, demands) = (JobId::from("job"), Demands::default());
    let contents: Vec<Vec<u8>> = (0..5000u32).map(|number| number.to_le_bytes().repeat(5)).collect();
    let refs: Vec<&[u8]> = contents.iter().map(Vec::as_slice).collect();
    // In memory of its worker alone.
    let private = owner.store.put(&refs, Encryption::None, None).unwrap();
    let shared = owner.put(&refs, &job, &demands).unwrap();
    let both = [private, shared];
    let parts = both.iter().flat_map(|id| (0..5000).map(|part| wanted(&owner, *id, part, 20))).collect();
    let fetched = reader.fetch(FetchRequest { packed: false, ..request(parts, demands) }, || false).unwrap();
    assert!(fetched.parts.iter().zip(contents.iter().cycle()).all(|(part, own)| part.bytes() == own));
    let facts = reader.fetcher.transfers().remove(0).transport;
    assert_eq!(facts.bytes, [(Transport::Shm, 100_000), (Transport::Tcp, 100_000)].into());
    assert!(facts.fallbacks.iter().all(|why| why.contains("of its worker alone")), "{facts:?}");
}

#[test]
fn what_cannot_be_shared_comes_another_way_and_says_why() {
    let token = crate::auth::random::<16>();
    let owner = endpoint(&token, u64::MAX, None);
    let reader = endpoint(&token, u64::MAX, None);
    met(&owner);
    let content = vec![5; 10];
    let id = owner.put(&[&content], &JobId::from("job"), &Demands::default()).unwrap();
    let parts = vec![wanted(&owner, id, 0, 10)];
    let fetched = reader.fetch(request(parts, Demands::default()), || false).unwrap();
    assert!(fetched.parts[0].bytes() == content);
    let record = reader.fetcher.transfers().remove(0);
    assert_eq!(record.transport.chosen, Some(Transport::Tcp));
    let why = "below 64.0 KiB";
    assert!(record.transport.fallbacks.iter().any(|fallback| fallback.contains(why)), "{record:?}");
    let parts = vec![wanted(&owner, id, 0, 10)];
    let demands = Demands { transport: Some(Transport::Shm), ..Demands::default() };
    let other = endpoint(&token, u64::MAX, None);
    let refused = other.fetch(request(parts, demands), || false).err().unwrap();
    assert!(matches!(&refused, FetchError::Denied(own) if own.contains(why)), "{refused}");
}

#[test]
fn memory_that_somebody_may_still_write_to_is_not_lent() {
    let token = crate::auth::random::<16>();
    let (owner, reader) = (endpoint(&token, u64::MAX, None), endpoint(&token, u64::MAX, None));
    let (job, demands) = (JobId::from("job"), Demands::default());
    met(&owner);
    let segment = Arc::new(owner.allocate(1 << 20, &job, &demands, 0).unwrap());
    segment.add_writer();
    let id = owner.adopt(segment.clone(), &[1 << 20], Encryption::None).unwrap();
    let fetch = || {
        let parts = vec![wanted(&owner, id, 0, 1 << 20)];
        reader.fetch(request(parts, demands), || false).unwrap();
        reader.fetcher.transfers().remove(0).transport
    };
    // Not even to a reader in the same process.
    let own = FetchRequest { packed: false, ..request(vec![wanted(&owner, id, 0, 1 << 20)], demands) };
    let fetched = owner.fetch(own, || false).unwrap();
    assert_ne!(fetched.parts[0].bytes().as_ptr(), segment.as_ptr().cast_const());
    let facts = fetch();
    assert!(facts.fallbacks.iter().any(|fallback| fallback.contains("still holds")), "{facts:?}");
    segment.writer_gone();
    assert_eq!(fetch().bytes[&Transport::Shm], 1 << 20);
}
