//! Whether incast bites, and what each remedy would give.

use super::modern::{block, goodput, onset};
use super::{Form, Onset, Path};
use serde::Serialize;
use std::collections::BTreeSet;

/// Goodput below this part of the ideal is worth a remedy.
const BITES: f64 = 0.9;
/// Nine of ten measured points lie within this part of the model's, with selective acknowledgments and without
/// (docs/measurements.md, "incast, block by block").
const OFF_SACK: f64 = 0.25;
const OFF_PLAIN: f64 = 0.45;
/// What fits into the port is within this part of what one long flow gets.
const OFF_IDEAL: f64 = 0.07;
/// And where every sender's two segments fit DCTCP is between 73 and 95.5 of 95.5 Mbit/s: long fragments of few senders
/// overshoot in slow start (docs/measurements.md, "what a kernel forgets"). Without selective acknowledgments what is lost then
/// is a timeout, in no block or in every one: 95.3 and 16.1 Mbit/s were measured ("what is promised").
const OFF_DCTCP: f64 = 0.25;
/// What is advised for the minimum RTO, in seconds: what Mission Control asks of its own sockets (FACTS: 10 ms in effect,
/// as ticks are of 4 ms).
const RTO_MIN_S: f64 = 0.005;
/// Of DCTCP's threshold: half of the port, so that marks come before losses; but no more than 20 packets, what Alizadeh et
/// al. (2010, 4) use at 1 Gbit/s, where a seventh of rate times round trip (3.4 there) is not more.
const THRESHOLD_PACKETS: f64 = 20.0;
const THRESHOLD_OF_TRIP: f64 = 7.0;
/// Segments that each flow has on the way at least.
const WINDOW_LEAST: f64 = 2.0;
/// Where not even these fit, small windows and DCTCP may still help: 0.9 to 2.0 times what the lab has for all as it is in
/// twelve cases, 0.6 to 2.5 times what the model has (docs/measurements.md, "the advice, applied again").
const SPILL_MOST: f64 = 2.6;
/// Ports with more are not sold.
const BUFFER_MOST: u64 = 1 << 30;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// So many senders at once.
    Flows,
    /// A minimum RTO, in seconds.
    RtoMin,
    /// DCTCP, and packets marked that find so many bytes.
    Dctcp,
    /// A port with so many bytes.
    Buffer,
    /// A receiver's window of so many bytes.
    Window,
}

/// One way to get rid of incast; expected is goodput in Mbit/s, between low and high in nine cases of ten.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Remedy {
    pub kind: Kind,
    pub value: f64,
    pub expected_mbit: f64,
    pub low_mbit: f64,
    pub high_mbit: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Advice {
    pub bites: bool,
    pub onset: Onset,
    pub goodput_mbit: f64,
    pub ideal_mbit: f64,
    /// Best first.
    pub remedies: Vec<Remedy>,
}

/// What happens to blocks of this form from so many senders, and what each remedy would change.
///
/// # Errors
/// A path or a number of senders that cannot be: one line that names the mend.
pub fn advise(path: &Path, form: Form, senders: u32) -> Result<Advice, String> {
    path.check()?;
    let fragment = form.fragment(senders);
    if senders == 0 || fragment == 0 {
        return Err("nothing is sent by 0 senders, or in 0 bytes: use 1 or more".into());
    }
    let all = BTreeSet::new();
    let bits = fragment as f64 * 8.0 * f64::from(senders);
    let ideal_s = block(path, fragment, senders, &all).ideal_s;
    let (now, best) = (goodput(path, fragment, senders, &all) / 1e6, bits / ideal_s / 1e6);
    let off = if path.sack { OFF_SACK } else { OFF_PLAIN };
    let within =
        |expected: f64, off: f64| (expected, expected * (1.0 - off), (expected * (1.0 + off)).min(best * 1.02));
    let remedy =
        |kind, value, (expected_mbit, low_mbit, high_mbit)| Remedy { kind, value, expected_mbit, low_mbit, high_mbit };
    let modelled = |path: &Path| within(goodput(path, fragment, senders, &all) / 1e6, off);
    let fits = within(best, OFF_IDEAL);
    let (room, frames) = (path.buffer.bytes() as f64, path.mss as f64 + 66.0);

    // As many as the port holds with all that they send; one always fits.
    let flows = (room / (fragment as f64 * frames / path.mss as f64)).floor().max(1.0);
    let mut remedies = vec![remedy(Kind::Flows, flows.min(f64::from(senders)), fits)];
    if path.rto_s > RTO_MIN_S {
        remedies.push(remedy(Kind::RtoMin, RTO_MIN_S, modelled(&Path { rto_s: RTO_MIN_S, ..*path })));
    }
    // However small their windows are made, two segments of each are on the way.
    let least = WINDOW_LEAST * f64::from(senders) * frames;
    let spilling = |(expected, low, _): (f64, f64, f64)| (expected, low, (expected * SPILL_MOST).min(best * 1.02));
    let unless_too_many = |fits| if least <= room { fits } else { spilling(modelled(path)) };
    let trip = path.link_bits_per_sec / 8.0 * path.rtt_s / THRESHOLD_OF_TRIP;
    let threshold = (THRESHOLD_PACKETS * frames).max(trip).min(room / 2.0);
    let (_, low, high) = within(best, OFF_DCTCP);
    let late = bits / (ideal_s + path.rto_s) / 1e6 * (1.0 - OFF_IDEAL);
    remedies.push(remedy(
        Kind::Dctcp,
        threshold,
        unless_too_many((best, if path.sack { low } else { low.min(late) }, high)),
    ));
    let window = (room / f64::from(senders) / frames).floor().max(WINDOW_LEAST) * path.mss as f64;
    remedies.push(remedy(Kind::Window, window, unless_too_many(fits)));
    let mut bytes = path.buffer.bytes();
    while bytes < BUFFER_MOST {
        bytes *= 2;
        let larger = Path { buffer: super::Buffer::Port(bytes), ..*path };
        // At the onset it is chance whether incast happens: only beyond its whole interval a port is large enough.
        let too_many = onset(&larger, form, &all).low.is_some_and(|low| low <= senders);
        if !too_many && goodput(&larger, fragment, senders, &all) / 1e6 >= BITES * best {
            remedies.push(remedy(Kind::Buffer, bytes as f64, modelled(&larger)));
            break;
        }
    }
    remedies.sort_by(|a, b| b.expected_mbit.total_cmp(&a.expected_mbit));
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
            let flows = of(&own, Kind::Flows);
            assert_eq!((own.remedies[0].kind, flows.value), (Kind::Flows, 1.0));
            assert!(flows.low_mbit > 0.9 * own.ideal_mbit && flows.low_mbit < flows.expected_mbit);
            assert!(of(&own, Kind::RtoMin).expected_mbit > 1.5 * own.goodput_mbit);
            assert!(of(&own, Kind::Buffer).value >= 131_072.0);
        }
        // FACTS: DCTCP 88 Mbit/s at 16 senders, and from 32 on it collapses too.
        assert!(of(&advice(16), Kind::Dctcp).low_mbit < 90.0 && of(&advice(16), Kind::Dctcp).expected_mbit > 90.0);
        assert_eq!(of(&advice(47), Kind::Dctcp).expected_mbit, advice(47).goodput_mbit);
        assert!(of(&advice(47), Kind::Dctcp).high_mbit > 2.0 * advice(47).goodput_mbit);
    }

    #[test]
    fn without_selective_acknowledgments_dctcp_may_still_cost_each_block_a_timeout() {
        // Measured: 16.1 Mbit/s (docs/measurements.md, "what is promised").
        let own = advise(&modern::tests::path(65_536, false), Form::Fragment(32_000), 16).unwrap();
        let dctcp = own.remedies.iter().find(|remedy| remedy.kind == Kind::Dctcp).unwrap();
        assert!((15.0..16.1).contains(&dctcp.low_mbit) && dctcp.expected_mbit > 90.0, "{dctcp:?}");
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
        // Twice this port, 96 Mbit/s as it was promised, gave 60.6 (docs/measurements.md, "larger ports").
        let own = advise(&path(131_072), Form::Fragment(32_000), 47).unwrap();
        assert_eq!(own.remedies.iter().find(|remedy| remedy.kind == Kind::Buffer).unwrap().value, 524_288.0);
    }

    #[test]
    fn nonsense_is_refused() {
        assert!(advise(&path(65_536), Form::Fragment(64_000), 0).is_err());
        assert!(advise(&path(100), Form::Fragment(64_000), 4).unwrap_err().contains("holds no packet"));
    }
}
