//! HTTP/1.1 requests: small, one after the other on a connection.

/// Limits of a request's header, and of its body.
const HEAD_BYTES: usize = 16 << 10;
const BODY_BYTES: usize = 64 << 10;
const HEADERS: usize = 64;

/// Security headers for browsers: no content from elsewhere, no embedding in frames, and no text is run as code.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; \
                      form-action 'none'; frame-ancestors 'none'";

#[derive(Debug, PartialEq, Eq)]
pub struct Question {
    pub method: String,
    pub path: String,
    /// `Authorization: Bearer ..`.
    pub token: Option<String>,
    /// `Upgrade: ..`.
    pub upgrade: Option<String>,
    pub body: Vec<u8>,
}

/// The result of parsing received bytes.
#[derive(Debug, PartialEq, Eq)]
pub enum Heard {
    /// The request is not complete yet.
    Part,
    Question(Box<Question>),
    /// It is invalid: answer with this text, and close.
    Nonsense(&'static str),
}

/// Takes one request off the beginning of the received bytes.
pub fn hear(received: &mut Vec<u8>) -> Heard {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    let head = match request.parse(received) {
        Ok(httparse::Status::Complete(head)) => head,
        Ok(httparse::Status::Partial) if received.len() > HEAD_BYTES => {
            return Heard::Nonsense("the header is too long");
        }
        Ok(httparse::Status::Partial) => return Heard::Part,
        Err(_) => return Heard::Nonsense("this is not HTTP"),
    };
    let value = |name: &str| {
        let header = request.headers.iter().find(|header| header.name.eq_ignore_ascii_case(name))?;
        std::str::from_utf8(header.value).ok().map(str::trim)
    };
    if value("Transfer-Encoding").is_some() {
        return Heard::Nonsense("use Content-Length");
    }
    // Whoever stands between could read another length than this: one header, and digits only (RFC 9112, section 6.3).
    let mut lengths = request.headers.iter().filter(|header| header.name.eq_ignore_ascii_case("Content-Length"));
    let length = match (lengths.next().map(|header| header.value), lengths.next()) {
        (None, _) => 0,
        (Some(_), Some(_)) => return Heard::Nonsense("send one Content-Length"),
        (Some(digits), None) if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) => {
            return Heard::Nonsense("Content-Length is a number");
        }
        (Some(digits), None) => match std::str::from_utf8(digits).ok().and_then(|digits| digits.parse().ok()) {
            Some(length) if length <= BODY_BYTES => length,
            _ => return Heard::Nonsense("the body may have at most 64 KiB"),
        },
    };
    if received.len() < head + length {
        return Heard::Part;
    }
    let question = Question {
        method: request.method.unwrap_or_default().to_owned(),
        path: request.path.unwrap_or_default().to_owned(),
        token: value("Authorization").and_then(|value| value.strip_prefix("Bearer ")).map(str::to_owned),
        upgrade: value("Upgrade").map(str::to_owned),
        body: received[head..head + length].to_vec(),
    };
    received.drain(..head + length);
    Heard::Question(Box::new(question))
}

/// An answer as it is sent.
pub fn answer(status: u16, kind: &str, body: &str) -> Vec<u8> {
    let reason = match status {
        200 => "OK",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        409 => "Conflict",
        504 => "Gateway Timeout",
        _ => "Service Unavailable",
    };
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status} {reason}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nCache-Control: no-store\r\n\
         X-Content-Type-Options: nosniff\r\n\
         Content-Security-Policy: {POLICY}\r\nReferrer-Policy: no-referrer\r\n\r\n"
    );
    [head.as_bytes(), body.as_bytes()].concat()
}

/// An error answer, with a hint.
pub fn refusal(status: u16, why: &str) -> Vec<u8> {
    answer(status, "application/json", &serde_json::json!({ "error": why }).to_string())
}

/// From here on the connection is a session.
pub fn switches(protocol: &str) -> Vec<u8> {
    format!("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {protocol}\r\n\r\n").into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_come_one_after_the_other() {
        let first = b"POST /v1/ask HTTP/1.1\r\nAuthorization: Bearer abc\r\nContent-Length: 2\r\n\r\n{}";
        let second = b"GET / HTTP/1.1\r\n\r\n";
        let mut received = [&first[..], &second[..5]].concat();
        let Heard::Question(question) = hear(&mut received) else { panic!() };
        assert_eq!((question.token.as_deref(), &question.body[..]), (Some("abc"), &b"{}"[..]));
        assert_eq!(hear(&mut received), Heard::Part);
        received.extend_from_slice(&second[5..]);
        let Heard::Question(question) = hear(&mut received) else { panic!() };
        assert_eq!((question.method.as_str(), question.path.as_str(), received.len()), ("GET", "/", 0));
    }

    #[test]
    fn what_makes_no_sense_is_named_and_what_is_too_long_not_kept() {
        assert!(matches!(hear(&mut b"\x16\x03\x01 nonsense\r\n\r\n".to_vec()), Heard::Nonsense(_)));
        let long = format!("GET / HTTP/1.1\r\nX: {}", "x".repeat(HEAD_BYTES));
        assert!(matches!(hear(&mut long.into_bytes()), Heard::Nonsense(_)));
        let body = b"POST / HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n";
        assert!(matches!(hear(&mut body.to_vec()), Heard::Nonsense(_)));
        let chunked = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n";
        assert!(matches!(hear(&mut chunked.to_vec()), Heard::Nonsense(_)));
    }

    #[test]
    fn a_length_that_others_could_read_in_another_way_is_refused() {
        for lengths in ["4\r\nContent-Length: 4", "4\r\ncontent-length: 0", "+4", "0x4", "4, 4", "-4", "", "4\u{a0}"] {
            let request = format!("POST / HTTP/1.1\r\nContent-Length: {lengths}\r\n\r\nbody");
            assert!(matches!(hear(&mut request.clone().into_bytes()), Heard::Nonsense(_)), "{request:?}");
        }
        let request = b"POST / HTTP/1.1\r\nContent-Length:  4 \r\n\r\nbody";
        assert!(matches!(hear(&mut request.to_vec()), Heard::Question(_)));
    }
}
