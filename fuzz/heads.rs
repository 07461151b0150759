//! Heads of requests and answers, in one piece and in small ones: no input makes a parser panic, and what it
//! accepts says what it means.

#![no_main]

use libfuzzer_sys::fuzz_target;
use mission_transport::checksum;
use mission_transport::wire::{HeadReader, Request, Response, Wants};
use std::io::{self, Read};

/// Gives its bytes a few at a time, as a network may.
struct Dribble<'a>(&'a [u8]);

impl Read for Dribble<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = into.len().min(self.0.len()).min(7);
        into[..count].copy_from_slice(&self.0[..count]);
        self.0 = &self.0[count..];
        Ok(count)
    }
}

fuzz_target!(|bytes: &[u8]| {
    if let Ok(request) = Request::parse(bytes) {
        if let Wants::Range { start, len, .. } = request.wants {
            assert!(len > 0 && start.checked_add(len).is_some());
        }
        assert_eq!(Request::parse(&request.write()), Ok(request));
    }
    let _ = Response::parse(bytes);
    // No fuzzer guesses a checksum: with a right one it gets to what lies behind.
    let sealed = [bytes, format!("Mission-Head: {:016x}\r\n\r\n", checksum::of(bytes)).as_bytes()].concat();
    if let Ok(response) = Response::parse(&sealed) {
        assert_eq!(Response::parse(&response.write()), Ok(response));
    }
    let mut whole = HeadReader::default();
    let mut pieces = HeadReader::default();
    let (mut at_once, mut dribbled) = (io::Cursor::new(bytes), Dribble(bytes));
    loop {
        match (whole.read(&mut at_once), pieces.read(&mut dribbled)) {
            (Ok(Some(one)), Ok(Some(other))) => assert_eq!(one, other),
            (Ok(None), Ok(None)) | (Err(_), Err(_)) => break,
            (one, other) => panic!("{one:?} at once, {other:?} in pieces"),
        }
    }
});
