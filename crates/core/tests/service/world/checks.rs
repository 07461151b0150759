//! What must hold, after every step and in the end.

use super::*;

impl World {
    /// Only who has the leader's key now speaks for the service.
    pub(super) fn check_leads(&self, replica: usize, message: &FromService) {
        if let FromService::Welcome { epoch, .. } | FromService::Update { epoch, .. } = message {
            let key = self.store.key.map(|(replica, _, epoch, _)| (replica, epoch));
            assert_eq!(key, Some((replica, *epoch)), "at {:?} replica {replica} speaks for the service", self.now);
        }
    }

    pub(super) fn check_calm(&self) {
        let leaders = self.replicas.iter().filter(|own| own.machine.role() == Role::Leader).count();
        assert_eq!(leaders, 1);
        let weights = |cluster: usize| -> Vec<f64> {
            let own = self.clusters[cluster].machine.status();
            assert!(own.joined && own.guided, "{own:?}");
            let own = self.clusters[cluster].guided.as_ref();
            let own = own.unwrap_or_else(|| panic!("cluster {cluster}: {:?}", self.clusters[cluster].machine.status()));
            own.parts.values().map(|part| (part.weight * 1e6).round() / 1e6).collect()
        };
        assert_eq!(weights(0), [0.333333, 0.666667]);
        assert_eq!(weights(1), weights(0));
        assert_eq!(weights(2), [1.0]);
        let kept: BTreeSet<String> = self.replicas[0].machine.books().drained.iter().map(ToString::to_string).collect();
        let lost: Vec<_> = self.drained.difference(&kept).collect();
        assert!(lost.is_empty(), "answered, and lost: {lost:?}");
        let books: Vec<_> = self.replicas.iter().map(|own| own.machine.books()).collect();
        assert!(books.iter().all(|own| *own == books[0]), "{books:?}");
        assert!(self.clusters.iter().all(|own| own.policy.as_deref() == Some("priority")));
        assert!(books[0].unreadable.is_empty());
        for (index, own) in self.clusters.iter().enumerate() {
            let mut jobs: BTreeSet<String> = own.more.iter().map(|job| format!("more-{job}")).collect();
            jobs.insert(format!("job-{index}"));
            let kept = books[0].jobs_of(&name(index)).map(|(job, _)| job.to_string()).collect::<BTreeSet<_>>();
            assert_eq!(kept, jobs, "jobs of cluster {index}");
        }
    }
}
