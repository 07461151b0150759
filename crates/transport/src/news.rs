//! Tells an engine's adapter, through a descriptor, that there is something to report. The adapter's event loop sleeps
//! until then: an idle process costs it nothing.

use crate::endpoint::Endpoint;
use mission_core::defaults::REPORT_EVERY;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::write;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::thread::{self, JoinHandle};

/// Checks every `REPORT_EVERY` whether there are news, until it is dropped.
pub struct News {
    shared: Arc<Shared>,
    watcher: Option<JoinHandle<()>>,
}

struct Shared {
    readable: OwnedFd,
    closing: Mutex<bool>,
    closes: Condvar,
}

impl News {
    /// Starts a thread that watches an endpoint, and does not keep it.
    ///
    /// # Errors
    /// There is no descriptor, or no thread.
    pub fn of(endpoint: &Arc<Endpoint>) -> io::Result<News> {
        let readable = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        let shared = Arc::new(Shared { readable, closing: Mutex::new(false), closes: Condvar::new() });
        let (own, endpoint) = (shared.clone(), Arc::downgrade(endpoint));
        let watcher = thread::Builder::new()
            .name("mission-news".into())
            .stack_size(128 << 10)
            .spawn(move || own.watch(&endpoint))?;
        Ok(News { shared, watcher: Some(watcher) })
    }

    /// An eventfd; who makes the report ([`Endpoint::report`]) reads it first.
    pub fn descriptor(&self) -> RawFd {
        self.shared.readable.as_raw_fd()
    }
}

impl Drop for News {
    fn drop(&mut self) {
        *self.shared.closing.lock().expect("no panic while held") = true;
        self.shared.closes.notify_all();
        if let Some(watcher) = self.watcher.take() {
            let _ = watcher.join();
        }
    }
}

impl Shared {
    fn watch(&self, endpoint: &Weak<Endpoint>) {
        let mut closing = self.closing.lock().expect("no panic while held");
        while !*closing {
            (closing, _) = self.closes.wait_timeout(closing, REPORT_EVERY).expect("no panic while held");
            let Some(endpoint) = endpoint.upgrade().filter(|_| !*closing) else { return };
            if endpoint.has_news() {
                // An error says that the counter is full: it is readable.
                let _ = write(&self.readable, &1u64.to_ne_bytes());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoint::tests::settings;
    use crate::object::ObjectId;
    use mission_core::control::Taken;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::io::read;
    use std::time::Duration;

    fn take(news: &News) {
        let _ = read(&news.shared.readable, &mut [0; 8]);
    }

    fn becomes_readable(news: &News, within: Duration) -> bool {
        let mut waits = [PollFd::new(&news.shared.readable, PollFlags::IN)];
        let within: Timespec = within.try_into().unwrap();
        poll(&mut waits, Some(&within)).unwrap() == 1
    }

    #[test]
    fn an_idle_endpoint_wakes_nobody_and_what_happens_is_told_until_it_is_reported() {
        let endpoint = Arc::new(Endpoint::new(settings(b"of this test", u64::MAX, None)).unwrap());
        let news = News::of(&endpoint).unwrap();
        // What it says of its beginning, if anything.
        endpoint.report(0.0, None);
        take(&news);
        assert!(!becomes_readable(&news, 4 * REPORT_EVERY), "idle");
        let taken = Taken { object: ObjectId::random().into(), manifest: None };
        endpoint.control.took(taken);
        assert!(becomes_readable(&news, Duration::from_secs(30)));
        take(&news);
        assert!(becomes_readable(&news, Duration::from_secs(30)), "nobody has reported it");
        assert!(endpoint.report(0.0, None).is_some());
        take(&news);
        assert!(!becomes_readable(&news, 4 * REPORT_EVERY), "it is reported");
    }

    #[test]
    fn it_ends_with_its_endpoint() {
        let endpoint = Arc::new(Endpoint::new(settings(b"of that test", u64::MAX, None)).unwrap());
        let mut news = News::of(&endpoint).unwrap();
        drop(endpoint);
        news.watcher.take().unwrap().join().unwrap();
    }
}
