//! Read access for users, their tools and Prometheus: the console and its data.

use crate::http;
use crate::metrics;
use mission_core::policy::POLICIES;
use mission_core::service::{Look, Replica, Role, Sort, Status};
use mission_core::units::Time;
use percent_encoding::percent_decode_str;
use serde::Serialize;

/// The console: path, type and text of each file.
const FILES: [(&str, &str, &str); 8] = [
    ("/", "text/html", include_str!("../console/index.html")),
    ("/console.css", "text/css", include_str!("../console/console.css")),
    ("/common.js", "text/javascript", include_str!("../console/common.js")),
    ("/place.js", "text/javascript", include_str!("../console/place.js")),
    ("/asking.js", "text/javascript", include_str!("../console/asking.js")),
    ("/tables.js", "text/javascript", include_str!("../console/tables.js")),
    ("/drawing.js", "text/javascript", include_str!("../console/drawing.js")),
    ("/people.js", "text/javascript", include_str!("../console/people.js")),
];
/// Transfers of one answer, at most; events, at most.
const ROWS_MAX: usize = 1000;
/// Most words of a search.
const WORDS_MAX: usize = 16;

/// A status, and what the caller may do.
#[derive(Serialize)]
struct For {
    may_change: bool,
    /// Names of those that it could choose.
    policies: Vec<&'static str>,
    #[serde(flatten)]
    status: Status,
}

/// Answers that need no token, as they have nothing about jobs; `None`: another path.
pub fn for_all(replica: &Replica, path: &str) -> Option<Vec<u8>> {
    if path == "/healthz" {
        let role = if replica.role() == Role::Leader { "leader" } else { "follower" };
        return Some(http::answer(200, "text/plain", role));
    }
    let (_, kind, text) = FILES.iter().find(|(own, ..)| *own == path)?;
    Some(http::answer(200, &format!("{kind}; charset=utf-8"), text))
}

/// Needs a token.
pub fn is_one(path: &str) -> bool {
    matches!(path, "/v1/status" | "/v1/transfers" | "/v1/rates" | "/v1/history" | "/metrics")
}

pub fn answer(replica: &Replica, now: Time, path: &str, query: &str, may_change: bool) -> Vec<u8> {
    fn json(value: &impl Serialize) -> Vec<u8> {
        http::answer(200, "application/json", &serde_json::to_string(value).expect("plain values have a text"))
    }
    let found = match path {
        "/v1/status" => jobs(query).map(|(most, words)| {
            let policies = POLICIES.iter().map(|own| own.name).collect();
            json(&For { may_change, policies, status: replica.status(now, most, &words) })
        }),
        "/v1/transfers" => look(query).map(|look| json(&replica.transfers(now, &look))),
        "/v1/rates" => Ok(json(&replica.rates())),
        "/v1/history" => most(query, "most", 100).map(|most| json(&replica.history(now, most.min(ROWS_MAX)))),
        _ => {
            let text = metrics::text(&replica.status(now, metrics::JOBS_MAX, &[]));
            Ok(http::answer(200, "text/plain; version=0.0.4; charset=utf-8", &text))
        }
    };
    found.unwrap_or_else(|why| http::refusal(400, &why))
}

/// Pairs of a query (`a=1&b=2`), as texts.
fn pairs(query: &str) -> impl Iterator<Item = (String, String)> {
    query.split('&').filter(|pair| !pair.is_empty()).map(|pair| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let text = |word: &str| percent_decode_str(&word.replace('+', " ")).decode_utf8_lossy().into_owned();
        (text(name), text(value))
    })
}

fn words(text: &str) -> Vec<String> {
    text.to_lowercase().split_whitespace().take(WORDS_MAX).map(str::to_owned).collect()
}

/// How many jobs are shown, and which words their names have.
///
/// # Errors
/// One line that names what there is.
fn jobs(query: &str) -> Result<(usize, Vec<String>), String> {
    let (mut most, mut looked_for) = (usize::MAX, Vec::new());
    for (name, value) in pairs(query) {
        match (name.as_str(), value.parse()) {
            ("jobs", Ok(count)) => most = count,
            ("q", _) => looked_for = words(&value),
            _ => return Err(format!("{name}={value}: use jobs=NUMBER or q=WORDS")),
        }
    }
    Ok((most, looked_for))
}

/// # Errors
/// One line that names what there is.
fn most(query: &str, wanted: &str, usual: usize) -> Result<usize, String> {
    let mut most = usual;
    for (name, value) in pairs(query) {
        most = match value.parse() {
            Ok(count) if name == wanted => count,
            _ => return Err(format!("{name}={value}: use {wanted}=NUMBER")),
        };
    }
    Ok(most)
}

/// # Errors
/// One line that names what there is.
fn look(query: &str) -> Result<Look, String> {
    let mut look = Look { most: 100, ..Look::default() };
    for (name, value) in pairs(query) {
        let wrong = |what: &str| format!("{name}={value}: {what}");
        let number = || value.parse::<usize>().map_err(|_| wrong("use a number"));
        match name.as_str() {
            "q" => look.words = words(&value),
            "cluster" => look.cluster = Some(value),
            "job" => look.job = Some(value),
            "sort" => {
                let text = serde_json::Value::String(value.clone());
                look.sort = serde_json::from_value::<Sort>(text)
                    .map_err(|_| wrong("use rate, left, served, weight, age or name"))?;
            }
            "ascending" => look.ascending = value == "1",
            "offset" => look.offset = number()?,
            "most" => look.most = number()?.min(ROWS_MAX),
            _ => return Err(format!("{name}: use q, cluster, job, sort, ascending, offset or most")),
        }
    }
    Ok(look)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_looked_for_is_in_the_query() {
        let own = look("q=Every%20Night+shm&cluster=a%2Fb&job=&sort=left&ascending=1&offset=3&most=99999").unwrap();
        assert_eq!(
            own,
            Look {
                words: vec!["every".into(), "night".into(), "shm".into()],
                cluster: Some("a/b".into()),
                job: Some(String::new()),
                sort: Sort::Left,
                ascending: true,
                offset: 3,
                most: ROWS_MAX,
            }
        );
        assert!(look("sort=colour").unwrap_err().contains("use rate, left"));
        assert!(look("offset=-1").unwrap_err().contains("a number"));
        assert!(look("colour=red").unwrap_err().contains("use q, cluster"));
        assert!(most("most=x", "most", 1).is_err());
        assert_eq!(most("", "most", 1), Ok(1));
        assert_eq!(jobs("jobs=3&q=A+b"), Ok((3, vec!["a".into(), "b".into()])));
        assert!(jobs("jobs=x").is_err());
    }
}
