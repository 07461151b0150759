//! Whether incast collapses goodput, and what each mitigation is predicted to give.

use super::modern::{block, goodput, onset};
use super::{Form, Onset, Path};
use serde::Serialize;
use std::collections::BTreeSet;

/// Goodput below this fraction of the ideal is worth a mitigation.
const BITES: f64 = 0.9;
/// Lower bounds of measured goodput as a fraction of the prediction, in nine of ten cases
/// (docs/measurements/incast-advice.md: seeds 20261121, 20261122, 77 and 81). If all fits into the port: 0.99 and more.
const LEAST_FITS: f64 = 0.93;
/// With a short minimum RTO, with selective acknowledgments: 0.86 to 1.05; without: 0.76 to 1.04.
const LEAST_RTO_SACK: f64 = 0.8;
const LEAST_RTO_PLAIN: f64 = 0.72;
/// With a larger port: 0.89 to 1.00.
const LEAST_BUFFER: f64 = 0.8;
/// With DCTCP, where every sender's two segments fit: 0.76 to 0.94, as long fragments of few senders overshoot in slow start.
const LEAST_DCTCP: f64 = 0.72;
/// Upper bound of measured goodput by the prediction, but never more than the ideal.
const MOST: f64 = 1.06;
/// One flow exceeded the ideal of the model by this factor.
const MOST_IDEAL: f64 = 1.02;
/// Reason for no prediction: without selective acknowledgments 95, 67, 59, 19 and 16 of 95 Mbit/s were measured.
const DCTCP_PLAIN: &str = "without selective acknowledgments DCTCP's first losses end in a timeout, in no block or in \
    every block: measure it";
/// Reason for no prediction: small windows and DCTCP had 0.9 to 2.0 times the goodput without them.
const TOO_MANY: &str = "two segments of each sender are more than the port holds: the gain may be a factor of two, or \
    nothing";
/// Advised minimum RTO, in seconds: the value that Mission Control requests for its own sockets (FACTS: 10 ms in
/// effect, with ticks of 4 ms).
const RTO_MIN_S: f64 = 0.005;
/// Of DCTCP's threshold: half of the port, so that marks come before losses; but no more than 20 packets, what Alizadeh et
/// al. (2010, 4) use at 1 Gbit/s, where a seventh of rate times round trip (3.4 there) is not more.
const THRESHOLD_PACKETS: f64 = 20.0;
const THRESHOLD_OF_TRIP: f64 = 7.0;
/// Segments that each flow has in flight at least.
const WINDOW_LEAST: f64 = 2.0;
/// Ports with more are not sold.
const BUFFER_MOST: u64 = 1 << 30;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Limit the senders in parallel to this number.
    Flows,
    /// A minimum RTO, in seconds.
    RtoMin,
    /// DCTCP, with packets marked above so many queued bytes.
    Dctcp,
    /// A port with so many bytes.
    Buffer,
    /// A receiver's window of so many bytes.
    Window,
}

/// Goodput in Mbit/s, between low and high in nine cases of ten.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Promise {
    pub expected_mbit: f64,
    pub low_mbit: f64,
    pub high_mbit: f64,
}

/// One mitigation of incast.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Remedy {
    pub kind: Kind,
    pub value: f64,
    /// `None`: nothing can be predicted.
    pub promise: Option<Promise>,
    /// Why not; empty if there is a prediction.
    pub unknown: &'static str,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Advice {
    pub bites: bool,
    pub onset: Onset,
    pub goodput_mbit: f64,
    pub ideal_mbit: f64,
    /// Best first; those without a prediction last.
    pub remedies: Vec<Remedy>,
}

/// Predicts goodput of blocks of this form from so many senders, and with each mitigation.
///
/// # Errors
/// An invalid path or number of senders: one line with a hint.
pub fn advise(path: &Path, form: Form, senders: u32) -> Result<Advice, String> {
    path.check()?;
    let fragment = form.fragment(senders);
    if senders == 0 || fragment == 0 {
        return Err("0 senders or 0 bytes send nothing: use 1 or more".into());
    }
    let all = BTreeSet::new();
    let bits = fragment as f64 * 8.0 * f64::from(senders);
    let ideal_s = block(path, fragment, senders, &all).ideal_s;
    let (now, best) = (goodput(path, fragment, senders, &all) / 1e6, bits / ideal_s / 1e6);
    let promise = |expected: f64, least: f64| {
        let high = (expected * MOST).min(best * MOST_IDEAL);
        Ok(Promise { expected_mbit: expected, low_mbit: expected * least, high_mbit: high })
    };
    let remedy = |kind, value, promised: Result<Promise, &'static str>| Remedy {
        kind,
        value,
        promise: promised.ok(),
        unknown: promised.err().unwrap_or(""),
    };
    let modelled = |path: &Path, least| promise(goodput(path, fragment, senders, &all) / 1e6, least);
    let fits = promise(best, LEAST_FITS);
    let (room, frames) = (path.buffer.bytes() as f64, path.mss as f64 + 66.0);

    // As many senders as the port holds with whole fragments; one always fits.
    let flows = (room / (fragment as f64 * frames / path.mss as f64)).floor().max(1.0);
    let mut remedies = vec![remedy(Kind::Flows, flows.min(f64::from(senders)), fits)];
    if path.rto_s > RTO_MIN_S {
        remedies.push(remedy(Kind::RtoMin, RTO_MIN_S, {
            modelled(&Path { rto_s: RTO_MIN_S, ..*path }, if path.sack { LEAST_RTO_SACK } else { LEAST_RTO_PLAIN })
        }));
    }
    // However small their windows are, two segments of each are in flight.
    let least = WINDOW_LEAST * f64::from(senders) * frames;
    let unless_too_many = |fits| if least <= room { fits } else { Err(TOO_MANY) };
    let trip = path.link_bits_per_sec / 8.0 * path.rtt_s / THRESHOLD_OF_TRIP;
    let threshold = (THRESHOLD_PACKETS * frames).max(trip).min(room / 2.0);
    let marked = if path.sack { promise(best, LEAST_DCTCP) } else { Err(DCTCP_PLAIN) };
    remedies.push(remedy(Kind::Dctcp, threshold, unless_too_many(marked)));
    let window = (room / f64::from(senders) / frames).floor().max(WINDOW_LEAST) * path.mss as f64;
    remedies.push(remedy(Kind::Window, window, unless_too_many(fits)));
    let mut bytes = path.buffer.bytes();
    while bytes < BUFFER_MOST {
        bytes *= 2;
        let larger = Path { buffer: super::Buffer::Port(bytes), ..*path };
        // At the onset it is chance whether incast happens: only beyond its whole interval a port is large enough.
        let too_many = onset(&larger, form, &all).low.is_some_and(|low| low <= senders);
        if !too_many && goodput(&larger, fragment, senders, &all) / 1e6 >= BITES * best {
            remedies.push(remedy(Kind::Buffer, bytes as f64, modelled(&larger, LEAST_BUFFER)));
            break;
        }
    }
    let expected = |remedy: &Remedy| remedy.promise.map_or(0.0, |promise| promise.expected_mbit);
    remedies.sort_by(|a, b| expected(b).total_cmp(&expected(a)));
    Ok(Advice {
        bites: now < BITES * best,
        onset: onset(path, form, &all),
        goodput_mbit: now,
        ideal_mbit: best,
        remedies,
    })
}

#[cfg(test)]
mod tests {
    use super::super::modern;
    use super::*;

    fn path(buffer: u64) -> Path {
        modern::tests::path(buffer, true)
    }

    #[test]
    fn where_nothing_is_lost_nothing_is_to_be_mended() {
        assert!(!advise(&path(1 << 20), Form::Fragment(16_000), 16).unwrap().bites);
        assert!(!advise(&path(65_536), Form::Fragment(64_000), 1).unwrap().bites);
    }

    #[test]
    fn fewer_flows_cure_it_always_and_small_windows_only_while_they_fit() {
        let advice = |senders| advise(&path(65_536), Form::Fragment(64_000), senders).unwrap();
        let of = |advice: &Advice, kind| *advice.remedies.iter().find(|remedy| remedy.kind == kind).unwrap();
        for senders in [16, 47] {
            let own = advice(senders);
            assert!(own.bites && own.goodput_mbit < 0.75 * own.ideal_mbit);
            assert_eq!((own.remedies[0].kind, own.remedies[0].value), (Kind::Flows, 1.0));
            let flows = own.remedies[0].promise.unwrap();
            assert!(flows.low_mbit > 0.9 * own.ideal_mbit && flows.low_mbit < flows.expected_mbit);
            assert!(of(&own, Kind::RtoMin).promise.unwrap().expected_mbit > 1.5 * own.goodput_mbit);
            assert!(of(&own, Kind::Buffer).value >= 131_072.0);
        }
        // FACTS: DCTCP 88 Mbit/s at 16 senders, and from 32 on it collapses too.
        let dctcp = of(&advice(16), Kind::Dctcp).promise.unwrap();
        assert!(dctcp.low_mbit < 88.0 && dctcp.high_mbit > 88.0);
        for kind in [Kind::Dctcp, Kind::Window] {
            let own = of(&advice(47), kind);
            assert_eq!((own.promise, own.unknown), (None, TOO_MANY));
        }
    }

    #[test]
    fn what_is_promised_is_promised_within_a_factor_of_one_and_a_half() {
        for (senders, kilobytes, kibibytes, sack) in
            (2..=47).flat_map(|n| [(n, 16, 32, true), (n, 64, 64, false), (n, 256, 128, true), (n, 32, 16, false)])
        {
            let own = modern::tests::path(kibibytes << 10, sack);
            for remedy in advise(&own, Form::Fragment(kilobytes * 1000), senders).unwrap().remedies {
                let Some(promise) = remedy.promise else {
                    assert!(!remedy.unknown.is_empty());
                    continue;
                };
                assert!(promise.low_mbit <= promise.expected_mbit && promise.expected_mbit <= promise.high_mbit);
                assert!(promise.high_mbit <= 1.5 * promise.low_mbit, "{remedy:?}");
            }
        }
    }

    #[test]
    fn without_selective_acknowledgments_nothing_is_promised_of_dctcp() {
        // Measured: 16.1 Mbit/s (docs/measurements/incast-advice/seeds-77-and-81.md).
        let own = advise(&modern::tests::path(65_536, false), Form::Fragment(32_000), 16).unwrap();
        let dctcp = own.remedies.iter().find(|remedy| remedy.kind == Kind::Dctcp).unwrap();
        assert_eq!((dctcp.promise, dctcp.unknown), (None, DCTCP_PLAIN));
    }

    #[test]
    fn a_port_that_is_advised_is_beyond_the_onset() {
        for (senders, kilobytes, kibibytes) in
            (8..=47).flat_map(|n| [16, 32, 64, 256].map(|f| (n, f, 4 * u64::from(n))))
        {
            let (own, form) = (path(kibibytes << 10), Form::Fragment(kilobytes * 1000));
            let advised = advise(&own, form, senders).unwrap();
            let port = advised.remedies.iter().find(|remedy| remedy.kind == Kind::Buffer).unwrap();
            let larger = Path { buffer: super::super::Buffer::Port(port.value as u64), ..own };
            let low = onset(&larger, form, &BTreeSet::new()).low;
            assert!(low.is_none_or(|low| low > senders), "{senders} of {kilobytes} kB: {} bytes, {low:?}", port.value);
        }
        // Twice this port, for which 96 Mbit/s were predicted, gave 60.6 (docs/measurements/incast-advice/seeds-77-and-81.md).
        let own = advise(&path(131_072), Form::Fragment(32_000), 47).unwrap();
        assert_eq!(own.remedies.iter().find(|remedy| remedy.kind == Kind::Buffer).unwrap().value, 524_288.0);
    }

    #[test]
    fn nonsense_is_refused() {
        assert!(advise(&path(65_536), Form::Fragment(64_000), 0).is_err());
        assert!(advise(&path(100), Form::Fragment(64_000), 4).unwrap_err().contains("holds no packet"));
    }
}
