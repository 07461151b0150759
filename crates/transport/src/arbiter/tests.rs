use super::names::{GENERATIONS, name};
use super::*;
use crate::host::cluster_name;
use mission_core::host::Ticket;

fn arbiter(key: &str) -> Arbiter {
    Arbiter::new(key, Token::new(b"secret"), FlowsPerHost::Fixed(2), Box::new(|| ())).unwrap()
}

fn cluster() -> String {
    cluster_name(&crate::auth::random::<16>())
}

fn want(arbiter: &Arbiter, ticket: Ticket) {
    arbiter.send(ToArbiter::Want { ticket, group: 1, member: 1, bytes: 1 });
}

/// Whether it is granted within some seconds; answers pings meanwhile.
fn granted(arbiter: &Arbiter, ticket: Ticket, within: Duration) -> bool {
    let end = Instant::now() + within;
    while Instant::now() < end {
        match arbiter.next() {
            Some(Said::Message(FromArbiter::Grant { ticket: own })) if own == ticket => return true,
            Some(Said::Message(FromArbiter::Ping { .. })) => arbiter.send(ToArbiter::Pong),
            Some(_) => {}
            None => thread::sleep(Duration::from_millis(1)),
        }
    }
    false
}

fn joined(arbiter: &Arbiter, remote: bool) {
    let end = Instant::now() + Duration::from_secs(10);
    while arbiter.next() != Some(Said::Joined { remote }) {
        assert!(Instant::now() < end);
        thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until a process that has lost its arbiter has another, or is it.
fn joined_again(arbiter: &Arbiter) {
    let (end, mut lost) = (Instant::now() + Duration::from_secs(10), false);
    loop {
        match arbiter.next() {
            Some(Said::Lost) => lost = true,
            Some(Said::Joined { .. }) if lost => return,
            Some(_) => {}
            None => thread::sleep(Duration::from_millis(1)),
        }
        assert!(Instant::now() < end, "it has lost its arbiter: {lost}");
    }
}

const SOON: Duration = Duration::from_secs(5);
const NOT: Duration = Duration::from_millis(100);

#[test]
fn processes_of_a_host_share_its_slots() {
    let key = cluster();
    let (first, second) = (arbiter(&key), arbiter(&key));
    assert!(first.gives_out() && !second.gives_out());
    want(&first, 1);
    want(&first, 2);
    assert!(granted(&first, 1, SOON) && granted(&first, 2, SOON));
    want(&second, 1);
    assert!(!granted(&second, 1, NOT));
    first.send(ToArbiter::Done { ticket: 1, moved: 1 });
    assert!(granted(&second, 1, SOON));
}

#[test]
fn a_lost_connection_returns_its_slots_and_a_lost_arbiter_is_replaced() {
    let key = cluster();
    let (first, second, third) = (arbiter(&key), arbiter(&key), arbiter(&key));
    want(&second, 1);
    want(&second, 2);
    assert!(granted(&second, 1, SOON) && granted(&second, 2, SOON));
    want(&third, 1);
    assert!(!granted(&third, 1, NOT));
    joined(&third, true);
    // The arbiter goes; the second reports to its successor that it still holds both slots.
    drop(first);
    joined_again(&second);
    joined_again(&third);
    for ticket in [11, 12] {
        second.send(ToArbiter::Held { ticket, group: 1, member: 1 });
    }
    want(&third, 2);
    assert!(!granted(&third, 2, NOT));
    drop(second);
    // If the second was the arbiter, the third reports again to itself.
    if !granted(&third, 2, NOT) {
        want(&third, 3);
        assert!(granted(&third, 3, SOON));
    }
}

#[test]
fn a_process_that_loses_its_arbiter_keeps_its_neighbours_during_the_election() {
    let key = cluster();
    let (first, second, third) = (arbiter(&key), arbiter(&key), arbiter(&key));
    drop(first);
    // Through every state of the election, and until the other has followed.
    let end = Instant::now() + Duration::from_secs(10);
    while !second.gives_out() && !third.gives_out() {
        assert!(second.has_neighbours() && third.has_neighbours() && Instant::now() < end);
    }
    assert!(second.has_neighbours() && third.has_neighbours());
}

#[test]
fn an_arbiter_that_loses_its_last_client_expects_it_back_for_a_while() {
    let key = cluster();
    let (first, second) = (arbiter(&key), arbiter(&key));
    let alone = || matches!(&first.shared.lock().role, Role::Leader(leader) if leader.clients.is_empty());
    let end = Instant::now() + Duration::from_secs(10);
    while alone() {
        assert!(Instant::now() < end, "the second joins");
    }
    drop(second);
    while !alone() {
        assert!(Instant::now() < end, "the second has left");
    }
    assert!(first.has_neighbours());
}

#[test]
fn another_token_has_slots_of_its_own() {
    let key = cluster();
    let first = arbiter(&key);
    let stranger = Arbiter::new(&key, Token::new(b"other"), FlowsPerHost::Fixed(2), Box::new(|| ())).unwrap();
    assert!(first.gives_out() && stranger.gives_out());
    assert!(!first.has_neighbours());
}

#[test]
fn a_socket_that_takes_no_connections_keeps_nobody_from_sharing() {
    use socket2::{Domain, SockAddr, Socket, Type};
    let key = cluster();
    let socket = || Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
    // Its queue of connections is full, so no process can find out whose it is.
    let address = SockAddr::unix(format!("\0{}", name(&key, GENERATIONS - 1))).unwrap();
    let (full, waits) = (socket(), socket());
    full.bind(&address).unwrap();
    full.listen(0).unwrap();
    waits.connect(&address).unwrap();
    let (first, second) = (arbiter(&key), arbiter(&key));
    assert!(first.gives_out() && !second.gives_out() && first.alone().is_none());
}

#[test]
fn a_name_that_somebody_has_taken_and_does_not_answer_is_passed_over() {
    let key = cluster();
    let _taken = crate::local::bind(&name(&key, 1)).unwrap();
    let (first, second) = (arbiter(&key), arbiter(&key));
    assert!(first.gives_out() && !second.gives_out() && first.alone().is_none());
    want(&second, 1);
    assert!(granted(&second, 1, SOON));
}
