//! What goes wrong.

use super::*;

impl World {
    /// Something goes wrong every two seconds or so.
    pub(super) fn fault(&mut self) {
        if !self.chance(0.01) {
            return;
        }
        let long = Duration::from_millis(200 + self.dice.next() % 8000);
        let until = self.now + long;
        // The leader is hit as often as all others.
        let leader = self.replicas.iter().position(|own| own.machine.role() == Role::Leader);
        let replica = match leader {
            Some(leader) if self.chance(0.5) => leader,
            _ => self.pick(REPLICAS),
        };
        match self.pick(5) {
            0 => self.kill(replica, until),
            1 => self.replicas[replica].stopped_until = Some(until),
            2 => _ = self.cut.insert((Node::Store, Node::Replica(replica)), until),
            3 => {
                let cluster = self.pick(CLUSTERS);
                self.cut.insert((Node::Replica(replica), Node::Cluster(cluster)), until);
            }
            _ => {
                // The store is away from all.
                (0..REPLICAS).for_each(|replica| _ = self.cut.insert((Node::Store, Node::Replica(replica)), until));
            }
        }
    }

    pub(super) fn kill(&mut self, replica: usize, until: Time) {
        let own = &mut self.replicas[replica];
        own.machine = Replica::new(named(replica), "priority".into(), 2000 + own.life);
        (own.life, own.dead_until, own.stopped_until) = (own.life + 1, Some(until), None);
        own.waiting.clear();
        self.store.watches.retain(|(own, _)| *own != replica);
        for cluster in 0..CLUSTERS {
            if let Some((session, with)) = self.clusters[cluster].session
                && with == replica
            {
                let event = FollowerEvent::Disconnected { why: "reset".into() };
                self.post(
                    Node::Replica(replica),
                    Node::Cluster(cluster),
                    Mail::ToCluster { to: cluster, session, event },
                );
            }
        }
    }

    pub(super) fn is_cut(&self, a: Node, b: Node) -> bool {
        [(a, b), (b, a)].iter().any(|ends| self.cut.get(ends).is_some_and(|until| *until > self.now))
    }
}
