//! The store in a real etcd: three members on loopback, of which one is stopped or killed. Skipped, with one line, where
//! there is no etcd.

use mission_core::service::Entry;
use mission_service::store::etcd::Etcd;
use mission_service::store::{Changed, Failure, Store};
use std::io::Write;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

struct Cluster {
    members: Vec<Child>,
    clients: Vec<String>,
    folder: PathBuf,
}

/// Ports that nobody listens on now.
fn ports(count: usize) -> Vec<u16> {
    let listeners: Vec<_> = (0..count).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    listeners.iter().map(|listener| listener.local_addr().unwrap().port()).collect()
}

impl Cluster {
    /// `None`: there is no etcd.
    fn start(name: &str) -> Option<Cluster> {
        if Command::new("etcd").arg("--version").stdout(Stdio::null()).status().is_err() {
            // Not by `println!`, which a test that passes does not show.
            let _ = writeln!(std::io::stderr(), "skipped: there is no etcd on the path (Debian: etcd-server)");
            return None;
        }
        let folder = std::env::temp_dir().join(format!("mission-etcd-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        let ports = ports(6);
        let url = |port: u16| format!("http://127.0.0.1:{port}");
        let peers: Vec<String> = (0..3).map(|member| format!("m{member}={}", url(ports[3 + member]))).collect();
        let member = |member: usize| {
            let (client, peer) = (url(ports[member]), url(ports[3 + member]));
            Command::new("etcd")
                .args(["--name", &format!("m{member}"), "--data-dir"])
                .arg(folder.join(format!("m{member}")))
                .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
                .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
                .args(["--initial-cluster", &peers.join(","), "--initial-cluster-state", "new"])
                .args(["--logger", "zap", "--log-level", "error"])
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap()
        };
        let members = (0..3).map(member).collect();
        let clients = ports[..3].iter().map(|port| format!("127.0.0.1:{port}")).collect();
        let cluster = Cluster { members, clients, folder };
        let store = cluster.store();
        let end = Instant::now() + Duration::from_secs(30);
        while store.load().is_err() {
            assert!(Instant::now() < end, "etcd does not come up");
            std::thread::sleep(Duration::from_millis(100));
        }
        Some(cluster)
    }

    fn store(&self) -> Etcd {
        Etcd::new(&self.clients, "test").unwrap()
    }

    fn signal(&self, member: usize, signal: &str) {
        let pid = self.members[member].id().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for member in &mut self.members {
            let _ = member.kill();
            let _ = member.wait();
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn entry(key: &str, value: &str) -> Entry {
    (key.into(), Some(value.into()))
}

/// What is written of the policy.
fn value(change: &Changed) -> Option<String> {
    change.entries.iter().find(|(key, _)| key == "policy")?.1.clone()
}

/// Until it is so, within 10 s.
fn wait<T>(what: &str, mut get: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        if let Some(got) = get() {
            return got;
        }
        assert!(Instant::now() < end, "not within 10 s: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn one_leads_and_who_led_before_writes_nothing() {
    let Some(cluster) = Cluster::start("lead") else { return };
    let (first, second) = (cluster.store(), cluster.store());
    let elected = first.campaign("first").unwrap().unwrap();
    assert_eq!(second.campaign("second"), Ok(None));
    assert_eq!(
        first.campaign("first").unwrap().map(|again| again.epoch),
        Some(elected.epoch),
        "an answer that was lost"
    );
    first.write(elected.epoch, &[entry("policy", "\"fair\""), entry("job/a%2Fb/c", "{}")]).unwrap();
    assert!(first.renew().unwrap() > elected.until);
    let loaded = second.load().unwrap();
    assert_eq!(loaded.leader.as_deref(), Some("first"));
    assert_eq!(loaded.entries, [entry("job/a%2Fb/c", "{}"), entry("policy", "\"fair\"")]);
    // It is stopped: its lease ends, and another leads.
    let later = wait("the lease ends", || second.campaign("second").unwrap());
    assert!(later.epoch > elected.epoch);
    assert_eq!(first.renew(), Err(Failure::NotLeader));
    assert_eq!(first.write(elected.epoch, &[entry("policy", "\"fifo\"")]), Err(Failure::NotLeader));
    second.resign();
    wait("the key is free at once", || first.campaign("first").unwrap());
}

#[test]
fn changes_come_in_order_to_everybody_also_when_a_member_is_stopped() {
    let Some(cluster) = Cluster::start("watch") else { return };
    let (writer, reader) = (cluster.store(), cluster.store());
    let from = reader.load().unwrap().revision;
    let epoch = writer.campaign("writer").unwrap().unwrap().epoch;
    let written = std::thread::scope(|scope| {
        let watching = scope.spawn(|| {
            let (mut seen, mut after) = (Vec::<Changed>::new(), from);
            let is_last = |seen: &[Changed]| seen.last().is_some_and(|last| value(last).as_deref() == Some("19"));
            while !is_last(&seen) {
                // A watch that is silent, or breaks, is begun again where it ended.
                let _ = reader.watch(after, &mut |change| {
                    after = change.revision;
                    seen.push(change);
                    !is_last(&seen)
                });
                let _ = reader.load();
            }
            seen
        });
        for number in 0..20 {
            if number == 5 {
                cluster.signal(0, "-STOP");
            }
            if number == 15 {
                cluster.signal(0, "-CONT");
            }
            let entries = [entry("policy", &number.to_string()), (format!("gone/{number}"), None)];
            wait("a write", || {
                let _ = writer.renew();
                writer.write(epoch, &entries).ok()
            });
        }
        watching.join().unwrap()
    });
    assert_eq!(written[0].leader, Some(Some("writer".into())));
    let mut values: Vec<String> = written.iter().filter_map(value).collect();
    // A write of which nobody knows whether it happened is asked for again, and may happen twice.
    values.dedup();
    assert_eq!(values, (0..20).map(|number| number.to_string()).collect::<Vec<_>>());
    assert!(written.windows(2).all(|pair| pair[0].revision < pair[1].revision));
}

#[test]
fn without_most_members_nothing_is_answered_as_written() {
    let Some(mut cluster) = Cluster::start("most") else { return };
    let store = cluster.store();
    let epoch = store.campaign("writer").unwrap().unwrap().epoch;
    for member in [0, 1] {
        cluster.members[member].kill().unwrap();
        cluster.members[member].wait().unwrap();
    }
    let began = Instant::now();
    match store.write(epoch, &[entry("policy", "\"fair\"")]) {
        Err(Failure::Unknown(why)) => assert!(why.contains("etcd does not answer"), "{why}"),
        other => panic!("{other:?}"),
    }
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
}
