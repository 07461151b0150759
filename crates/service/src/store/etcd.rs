//! A store in etcd, by its JSON gateway (`/v3/..`): its other interface, gRPC, would need `protoc` to build.
//!
//! Keys lie under `/mission-control/NAME/`. The leader's key has a lease of [`LEASE`]; its create revision is the epoch,
//! and every write is a transaction that compares it (etcd documentation, "Concurrency": what its own elections do).
//!
//! A write without an answer may still be in progress, perhaps for long: a member of etcd that was stopped continues
//! with it. So every write also compares when [`SEQUENCE`] was written last, and writes it: of the writes that were
//! sent after the same one, one happens, and none after a later one.

use super::{Changed, Elected, Failure, Loaded, Store};
use crate::moment::Moment;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use mission_core::service::{Entry, Epoch};
use serde::Deserialize;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use ureq::Agent;
use ureq::tls::TlsConfig;

/// etcd's shortest, with its usual settings.
const LEASE: Duration = Duration::from_secs(2);
/// Timeout of one member of etcd; then another one is asked. Three of them are asked within a lease.
const ANSWER: Duration = Duration::from_millis(600);
/// For a transaction: it has to be on the disks of most members.
const WRITE: Duration = Duration::from_secs(2);
/// A watch on which nothing has come for so long may be dead.
const SILENCE: Duration = Duration::from_secs(3);
/// An answer of etcd is at most so long: all jobs of a service.
const ANSWER_BYTES: u64 = 64 << 20;
const LEADER: &str = "leader";
/// Key that each write sets: identifies the last writer.
const SEQUENCE: &str = "sequence";
/// Of one write, that earlier writes without an answer turn out to have happened before it.
const OVERTAKEN_MAX: usize = 16;

pub struct Etcd {
    members: Vec<String>,
    /// The member that answered last.
    good: AtomicUsize,
    prefix: String,
    quick: Agent,
    writes: Agent,
    watches: Agent,
    lease: Mutex<Option<Lease>>,
    last: Mutex<Last>,
}

/// The write of this replica that happened last.
#[derive(Default)]
struct Last {
    epoch: Epoch,
    /// Of the store, when it happened; the epoch, if there was none yet.
    revision: u64,
    /// Writes that were tried.
    tried: u64,
}

/// That this replica has.
#[derive(Clone)]
struct Lease {
    id: String,
    epoch: Option<Epoch>,
    until: Moment,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Header {
    revision: Number,
}

/// 64 bits are texts in etcd's JSON.
#[derive(Default, Deserialize)]
#[serde(transparent)]
struct Number(String);

impl Number {
    fn get(&self) -> u64 {
        self.0.parse().unwrap_or(0)
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct KeyValue {
    key: String,
    value: String,
    create_revision: Number,
    mod_revision: Number,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Range {
    header: Header,
    kvs: Vec<KeyValue>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Txn {
    header: Header,
    succeeded: bool,
    responses: Vec<Response>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Response {
    response_range: Range,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Granted {
    #[serde(rename = "ID")]
    id: Number,
    error: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct KeptAlive {
    result: Kept,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Kept {
    #[serde(rename = "TTL")]
    ttl: Number,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Watched {
    result: Events,
    error: Option<Value>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Events {
    canceled: bool,
    cancel_reason: String,
    compact_revision: Number,
    events: Vec<One>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct One {
    #[serde(rename = "type")]
    kind: String,
    kv: KeyValue,
}

impl Etcd {
    /// `members`: `HOST:PORT` of each. `name`: of the service; services of other names do not see one another. `tls`:
    /// settings for connections to members; `None`: plain text.
    ///
    /// # Errors
    /// There is no member.
    pub fn new(members: &[String], name: &str, tls: Option<TlsConfig>) -> Result<Etcd, String> {
        if members.is_empty() {
            return Err("no members of etcd: use --store etcd://HOST:PORT,HOST:PORT".into());
        }
        if let Some(member) = members.iter().find(|member| member.contains('/')) {
            return Err(format!("{member}: use HOST:PORT; --store-ca turns on TLS"));
        }
        let scheme = if tls.is_some() { "https" } else { "http" };
        let full = |member: &String| format!("{scheme}://{member}");
        let agent = |within: Option<Duration>, first: Duration| -> Agent {
            let settings = Agent::config_builder()
                .timeout_connect(Some(first))
                .timeout_global(within)
                .timeout_recv_response(Some(within.unwrap_or(first)))
                .timeout_recv_body(Some(within.unwrap_or(SILENCE)))
                .http_status_as_error(false)
                .max_redirects(0)
                .proxy(None);
            match &tls {
                Some(tls) => settings.tls_config(tls.clone()).build().into(),
                None => settings.build().into(),
            }
        };
        Ok(Etcd {
            members: members.iter().map(full).collect(),
            good: AtomicUsize::new(0),
            prefix: format!("/mission-control/{name}/"),
            quick: agent(Some(ANSWER), ANSWER),
            writes: agent(Some(WRITE), ANSWER),
            watches: agent(None, ANSWER),
            lease: Mutex::new(None),
            last: Mutex::default(),
        })
    }

    fn key(&self, key: &str) -> String {
        STANDARD.encode(format!("{}{key}", self.prefix))
    }

    /// All keys of the service: up to the first that does not begin like them.
    fn all(&self) -> Value {
        let mut end = self.prefix.clone().into_bytes();
        *end.last_mut().expect("a prefix") += 1;
        json!({"key": STANDARD.encode(&self.prefix), "range_end": STANDARD.encode(end)})
    }

    /// Asks the members in turn, the one that answered last first.
    fn ask<T: for<'de> Deserialize<'de>>(&self, agent: &Agent, path: &str, body: &Value) -> Result<T, Failure> {
        let first = self.good.load(Ordering::Relaxed);
        let mut why = String::new();
        for turn in 0..self.members.len() {
            let number = (first + turn) % self.members.len();
            match self.ask_one(agent, &self.members[number], path, body) {
                Ok(answer) => {
                    self.good.store(number, Ordering::Relaxed);
                    return Ok(answer);
                }
                Err(error) => why = format!("{}: {error}", self.members[number]),
            }
        }
        Err(Failure::Unknown(format!("etcd does not answer ({why})")))
    }

    fn ask_one<T: for<'de> Deserialize<'de>>(
        &self,
        agent: &Agent,
        member: &str,
        path: &str,
        body: &Value,
    ) -> Result<T, String> {
        let mut answer =
            agent.post(format!("{member}{path}")).send(body.to_string()).map_err(|error| error.to_string())?;
        let status = answer.status();
        let text =
            answer.body_mut().with_config().limit(ANSWER_BYTES).read_to_string().map_err(|error| error.to_string())?;
        if !status.is_success() {
            return Err(format!("{status} {}", text.chars().take(200).collect::<String>()));
        }
        serde_json::from_str(&text).map_err(|error| format!("{path}: {error}"))
    }

    /// The words of the service's own key; `None`: somebody else's.
    fn own(&self, key: &str) -> Option<String> {
        let key = String::from_utf8(STANDARD.decode(key).ok()?).ok()?;
        key.strip_prefix(&self.prefix).map(str::to_owned)
    }

    /// Of the events of one answer, what was written at each revision.
    fn changes(&self, events: Vec<One>) -> Vec<Changed> {
        let mut changes: Vec<Changed> = Vec::new();
        for event in events {
            let (Some(key), revision) = (self.own(&event.kv.key), event.kv.mod_revision.get()) else { continue };
            if changes.last().is_none_or(|last| last.revision != revision) {
                changes.push(Changed { revision, entries: Vec::new(), leader: None });
            }
            let change = changes.last_mut().expect("there is one now");
            let value = (event.kind != "DELETE").then(|| text(&event.kv.value));
            match key.as_str() {
                LEADER => change.leader = Some(value.map(Into::into)),
                // A write that changed nothing else has happened, too.
                SEQUENCE => {}
                _ => change.entries.push((key, value)),
            }
        }
        changes
    }

    /// The lease that this replica has, or a new one.
    fn granted(&self) -> Result<Lease, Failure> {
        if let Some(lease) = self.lock().clone().filter(|lease| lease.until > Moment::now() + LEASE / 2) {
            return Ok(lease);
        }
        let asked = Moment::now();
        let granted: Granted =
            self.ask(&self.quick, "/v3/lease/grant", &json!({"TTL": LEASE.as_secs().to_string()}))?;
        if granted.id.get() == 0 && granted.id.0.is_empty() {
            return Err(Failure::Unknown(format!("etcd granted no lease: {}", granted.error)));
        }
        let lease = Lease { id: granted.id.0, epoch: None, until: asked + LEASE };
        *self.lock() = Some(lease.clone());
        Ok(lease)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Lease>> {
        self.lease.lock().expect("no panic while held")
    }
}

fn text(value: &str) -> String {
    STANDARD.decode(value).ok().and_then(|bytes| String::from_utf8(bytes).ok()).unwrap_or_default()
}

impl Store for Etcd {
    fn load(&self) -> Result<Loaded, Failure> {
        let range: Range = self.ask(&self.writes, "/v3/kv/range", &self.all())?;
        let mut loaded = Loaded { revision: range.header.revision.get(), entries: Vec::new(), leader: None };
        for one in range.kvs {
            match self.own(&one.key) {
                Some(key) if key == LEADER => loaded.leader = Some(text(&one.value).into()),
                Some(key) if key == SEQUENCE => {}
                Some(key) => loaded.entries.push((key, Some(text(&one.value)))),
                None => {}
            }
        }
        Ok(loaded)
    }

    fn watch(&self, after: u64, each: &mut dyn FnMut(Changed) -> bool) -> Result<(), Failure> {
        let mut request = self.all();
        request["start_revision"] = json!((after + 1).to_string());
        let body = json!({ "create_request": request }).to_string();
        let member = &self.members[self.good.load(Ordering::Relaxed) % self.members.len()];
        let failed = |why: String| Failure::Unknown(format!("{member}: watch: {why}"));
        let answer =
            self.watches.post(format!("{member}/v3/watch")).send(body).map_err(|error| failed(error.to_string()))?;
        if !answer.status().is_success() {
            return Err(failed(answer.status().to_string()));
        }
        let mut lines = BufReader::new(answer.into_body().into_reader());
        let mut line = String::new();
        loop {
            line.clear();
            match lines.read_line(&mut line) {
                // The end, or nothing for a while.
                Ok(0) | Err(_) => return Ok(()),
                Ok(_) => {}
            }
            let watched: Watched = serde_json::from_str(&line).map_err(|error| failed(error.to_string()))?;
            if let Some(error) = watched.error {
                return Err(failed(error.to_string()));
            }
            let Events { canceled, cancel_reason, compact_revision, events, .. } = watched.result;
            if canceled {
                return Err(failed(format!("{cancel_reason} (compacted up to {})", compact_revision.get())));
            }
            for change in self.changes(events) {
                if !each(change) {
                    return Ok(());
                }
            }
        }
    }

    fn campaign(&self, address: &str) -> Result<Option<Elected>, Failure> {
        let lease = self.granted()?;
        let key = self.key(LEADER);
        let transaction = json!({
            "compare": [{"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}],
            "success": [
                {"request_put": {"key": key, "value": STANDARD.encode(address), "lease": lease.id}},
                {"request_put": {"key": self.key(SEQUENCE), "value": ""}},
            ],
        });
        let answer: Txn = self.ask(&self.quick, "/v3/kv/txn", &transaction)?;
        let epoch = if answer.succeeded {
            answer.header.revision.get()
        } else {
            // Its own, where the answer to an earlier try was lost.
            let range: Range = self.ask(&self.quick, "/v3/kv/range", &json!({ "key": key }))?;
            match range.kvs.first().filter(|own| text(&own.value) == address) {
                Some(own) if self.is_of(&lease)? => own.create_revision.get(),
                _ => return Ok(None),
            }
        };
        let mut own = self.lock();
        *own = Some(Lease { epoch: Some(epoch), ..lease.clone() });
        Ok(Some(Elected { epoch, until: lease.until }))
    }

    fn renew(&self) -> Result<Moment, Failure> {
        let Some(lease) = self.lock().clone().filter(|lease| lease.epoch.is_some()) else {
            return Err(Failure::NotLeader);
        };
        let asked = Moment::now();
        let kept: KeptAlive = self.ask(&self.quick, "/v3/lease/keepalive", &json!({"ID": lease.id}))?;
        let mut own = self.lock();
        if kept.result.ttl.get() == 0 {
            *own = None;
            return Err(Failure::NotLeader);
        }
        let until = asked + LEASE;
        *own = Some(Lease { until, ..lease });
        Ok(until)
    }

    fn resign(&self) {
        let lease = self.lock().take();
        if let Some(lease) = lease {
            let _: Result<Value, Failure> = self.ask(&self.quick, "/v3/lease/revoke", &json!({"ID": lease.id}));
        }
    }

    fn write(&self, epoch: Epoch, entries: &[Entry]) -> Result<u64, Failure> {
        let operation = |(key, value): &Entry| match value {
            Some(value) => json!({"request_put": {"key": self.key(key), "value": STANDARD.encode(value)}}),
            None => json!({"request_delete_range": {"key": self.key(key)}}),
        };
        let mut last = self.last.lock().expect("no panic while held");
        if last.epoch != epoch {
            *last = Last { epoch, revision: epoch, tried: last.tried };
        }
        last.tried += 1;
        let (leader, sequence) = (self.key(LEADER), self.key(SEQUENCE));
        let own = STANDARD.encode(format!("{epoch}/{}", last.tried));
        let mut success = vec![json!({"request_put": {"key": sequence, "value": own}})];
        success.extend(entries.iter().map(operation));
        for _ in 0..OVERTAKEN_MAX {
            let after = last.revision.to_string();
            let transaction = json!({
                "compare": [
                    {"key": leader, "target": "CREATE", "result": "EQUAL", "create_revision": epoch.to_string()},
                    {"key": sequence, "target": "MOD", "result": "EQUAL", "mod_revision": after},
                ],
                "success": success,
                "failure": [{"request_range": {"key": leader}}, {"request_range": {"key": sequence}}],
            });
            let answer: Txn = self.ask(&self.writes, "/v3/kv/txn", &transaction)?;
            if answer.succeeded {
                last.revision = answer.header.revision.get();
                return Ok(last.revision);
            }
            let found = |number: usize| answer.responses.get(number)?.response_range.kvs.first();
            if found(0).is_none_or(|leader| leader.create_revision.get() != epoch) {
                return Err(Failure::NotLeader);
            }
            let Some(sequence) = found(1) else {
                return Err(Failure::Unknown("etcd has lost the key of the last write".into()));
            };
            // An earlier write happened whose answer did not come, or this one, by way of another member.
            last.revision = sequence.mod_revision.get();
            if sequence.value == own {
                return Ok(last.revision);
            }
        }
        Err(Failure::Unknown(
            "another process writes under this replica's name: give each replica its own --address".into(),
        ))
    }
}

impl Etcd {
    /// Whether the leader's key is attached to a lease.
    fn is_of(&self, lease: &Lease) -> Result<bool, Failure> {
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct Keys {
            keys: Vec<String>,
        }
        let body = json!({"ID": lease.id, "keys": true});
        let keys: Keys = self.ask(&self.quick, "/v3/lease/timetolive", &body)?;
        Ok(keys.keys.contains(&self.key(LEADER)))
    }
}
