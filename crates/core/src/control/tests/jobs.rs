//! Which job a task belongs to, what it demands, and when it is over.

use super::*;

#[test]
fn a_job_is_over_when_all_have_said_their_last_words_or_are_late() {
    for late in [false, true] {
        let mut world = World::new(&["a", "b"]);
        let job = world.admit("etl", "client");
        world.task(1, "etl", None);
        world.event(Event::Leave { job: job.clone(), client: "client".into() });
        let report =
            TransferReport { job: "etl".into(), from: "m".into(), to: "r".into(), ..TransferReport::default() };
        let of = |last_of: Option<JobId>, served_bytes| {
            let records = vec![TransferReport { served_bytes, asked_bytes: 9, ..report.clone() }];
            WorkerReport { records, last_of, ..WorkerReport::default() }
        };
        world.event(Event::Report { worker: "a".into(), report: of(None, 4) });
        world.event(Event::Forgotten { task: 1 });
        let asked: Vec<_> = world.sent["a"].iter().filter_map(|message| message.report.clone()).collect();
        assert!(asked.iter().eq([&job]));
        world.event(Event::Report { worker: "a".into(), report: of(Some(job.clone()), 9) });
        assert!(!world.records.iter().any(|record| matches!(record, Record::JobEnded(_))), "b has not spoken");
        if late {
            world.pass(LAST_WORDS);
        } else {
            world.event(Event::Report { worker: "b".into(), report: of(Some(job.clone()), 1) });
        }
        let ended = world.records.iter().find_map(|record| match record {
            Record::JobEnded(job) => Some(job.transfers[0].status.served_bytes),
            _ => None,
        });
        assert_eq!(ended, Some(if late { 9 } else { 10 }));
        assert!(world.sent["b"].iter().any(|message| message.forget_job == Some(job.clone())));
        assert_eq!(world.left(), []);
        // Late reports do not restore anything.
        world.event(Event::Report { worker: "b".into(), report: of(None, 8) });
        assert_eq!(world.left(), []);
    }
}

#[test]
fn a_name_is_free_for_others_once_all_has_been_said_of_its_job() {
    let mut world = World::new(&["a"]);
    let job = world.admit("etl", "client");
    world.event(Event::Leave { job: job.clone(), client: "client".into() });
    // The worker may still report on the first one; its own client continues it.
    let demands = Demands { transport: Some(Transport::Mptcp), ..Demands::default() };
    let spec = JobSpec { demands, ..JobSpec::named("etl".into()) };
    let said = world.event(Event::Admit { spec, client: "client".into() });
    assert!(matches!(&said[..], [Command::Admitted { refused: Some(_), .. }]), "{said:?}");
    assert_eq!(&*world.admit("etl", "other"), "etl@other");
    assert_eq!(world.admit("etl", "client"), job);
    world.event(Event::Leave { job: job.clone(), client: "client".into() });
    let report = WorkerReport { last_of: Some(job), ..WorkerReport::default() };
    world.event(Event::Report { worker: "a".into(), report });
    assert_eq!(&*world.admit("etl", "third"), "etl");
}

#[test]
fn what_a_child_carries_lives_until_the_tasks_beside_its_parent_are_done() {
    let mut world = World::new(&["a"]);
    world.task(1, "etl", None);
    world.event(Event::Begins { task: 1, worker: "a".into() });
    world.task(2, "", Some(1));
    world.event(Event::Submitted { by: 1, tasks: vec![2] });
    world.event(Event::Begins { task: 2, worker: "a".into() });
    world.carries(2, 7, "a");
    world.event(Event::Ends { task: 2 });
    // Its client is gone with the call: the parent may still return the reference.
    world.event(Event::ResultGone { task: 2, wanted: false });
    world.event(Event::Forgotten { task: 2 });
    assert_eq!(world.heard("a").0, [0u128; 0]);
    world.carries(1, 7, "a");
    world.event(Event::Ends { task: 1 });
    assert_eq!(world.heard("a").0, [0u128; 0], "its own result carries it");
    world.event(Event::Forgotten { task: 1 });
    assert_eq!(world.heard("a").0, [7]);
    world.pass(LAST_WORDS);
    assert_eq!(world.left(), []);
}

#[test]
fn a_task_belongs_to_the_job_that_the_program_the_parent_or_the_client_says() {
    let mut world = World::new(&[]);
    world.task(1, "etl", None);
    world.task(2, "", Some(1));
    world.task(3, "", None);
    let span = Origin { client: "client".into(), spec: None, by: None, span: Some("part".into()) };
    let new = NewTask { task: 4, stage: "s".into(), kind: Kind::Work, inputs: vec![] };
    world.event(Event::Tasks { origin: span, tasks: vec![new] });
    let jobs = [1, 2, 3, 4].map(|task| world.controller.spec_of_task(task).unwrap().job.to_string());
    assert_eq!(jobs, ["etl", "etl", "client", "part"]);
}

#[test]
fn what_somebody_changed_of_a_job_holds_for_its_later_tasks() {
    let mut world = World::new(&["a"]);
    world.task(1, "etl", None);
    let change = Change { priority: Some(5.0), transport: Some(Some(Transport::Tcp)) };
    let said = world.event(Event::Change { job: "etl".into(), change });
    assert_eq!(said, [Command::Changed { error: None, refused: None }]);
    world.task(2, "etl", None);
    assert_eq!(world.controller.spec_of_task(2).unwrap().priority, 5.0);
    for (change, wrong, refused) in [
        (Change { priority: Some(0.0), transport: None }, true, false),
        (Change { priority: None, transport: Some(Some(Transport::Mptcp)) }, false, true),
    ] {
        let said = world.event(Event::Change { job: "etl".into(), change });
        let [Command::Changed { error, refused: why }] = &said[..] else { panic!("{said:?}") };
        assert_eq!((error.is_some(), why.is_some()), (wrong, refused));
    }
    let said = world.event(Event::Change { job: "nobody".into(), change: Change::default() });
    assert!(matches!(&said[..], [Command::Changed { error: Some(why), .. }] if why.contains("no job")), "{said:?}");
    assert_eq!(world.controller.spec_of_task(1).unwrap().priority, 5.0);
}

#[test]
fn jobs_that_demand_something_are_rejected_where_no_worker_has_a_data_plane() {
    let mut world = World::new(&[]);
    world.event(Event::Without { worker: "a".into(), why: "no memory".into() });
    world.event(Event::Known { worker: "a".into() });
    let mut spec = JobSpec::named("etl".into());
    world.admit("anything", "client");
    spec.demands.transport = Some(Transport::Tcp);
    let said = world.event(Event::Admit { spec: spec.clone(), client: "client".into() });
    assert!(
        matches!(&said[..], [Command::Admitted { refused: Some(why), .. }] if why.contains("no memory")),
        "{said:?}"
    );
    world.event(Event::Gone { worker: "a".into() });
    let said = world.event(Event::Admit { spec, client: "another".into() });
    assert!(matches!(&said[..], [Command::Admitted { refused: None, job }, ..] if &**job == "etl"), "{said:?}");
}

#[test]
fn tasks_come_in_any_order() {
    let new = |task, inputs: &[u64]| NewTask { task, stage: "s".into(), kind: Kind::Work, inputs: inputs.to_vec() };
    let given = vec![new(3, &[1, 2]), new(1, &[0, 99]), new(2, &[1, 2]), new(0, &[])];
    let order: Vec<u64> = inputs_first(given).into_iter().map(|own| own.task).collect();
    assert_eq!(order, [0, 1, 2, 3]);
    // A chain as long as any: no recursion.
    let chain: Vec<NewTask> = (0..100_000).rev().map(|task: u64| new(task, &[task.wrapping_sub(1)])).collect();
    assert!(inputs_first(chain).iter().map(|own| own.task).eq(0..100_000));
}

#[test]
fn names_that_cannot_be_printed_are_refused_and_those_of_spans_are_made_fit() {
    let mut world = World::new(&["a"]);
    let origin = |spec, span| Origin { client: "client".into(), spec, by: None, span };
    let new = |task| vec![NewTask { task, stage: "stage".into(), kind: Kind::Work, inputs: vec![] }];
    for wrong in ["", "a\nWARNING", &"x".repeat(300)] {
        let spec = JobSpec::named(wrong.into());
        let said = world.event(Event::Tasks { origin: origin(Some(spec.clone()), None), tasks: new(1) });
        assert!(matches!(&said[..], [Command::Invalid { why }] if why.len() < 200 && !why.contains('\n')), "{said:?}");
        assert!(world.controller.spec_of_task(1).is_none());
        let said = world.event(Event::Admit { spec, client: "client".into() });
        assert!(matches!(&said[..], [Command::Invalid { .. }]), "{said:?}");
    }
    world.event(Event::Tasks { origin: origin(None, Some("two\nlines".into())), tasks: new(2) });
    assert_eq!(world.controller.job_of(2).map(|job| &**job), Some("two?lines"));
}

#[test]
fn a_shuffle_that_the_engine_would_encrypt_is_encrypted_or_left_to_the_engine() {
    let carriers = vec![Transport::Tcp, Transport::Tls];
    let environment = Environment { carriers, interfaces: 1, engine_tls: true, ..Environment::default() };
    let mut world = World::with(&environment, &["a", "b"]);
    let workers = ["a".into(), "b".into()];
    world.task(1, "etl", None);
    assert_eq!(world.controller.shuffle_demands(1, &workers).unwrap().encrypt, Encryption::Authenticated);
    let demands = Demands { encrypt: Encryption::Opportunistic, transport: None };
    let spec = JobSpec { demands, ..JobSpec::named("other".into()) };
    let origin = Origin { client: "client".into(), spec: Some(spec), by: None, span: None };
    let task = NewTask { task: 2, stage: "stage".into(), kind: Kind::Work, inputs: vec![] };
    world.event(Event::Tasks { origin, tasks: vec![task] });
    assert_eq!(world.controller.shuffle_demands(2, &workers), Ok(demands), "what a job demands counts");
    world.join("c", Environment { engine_tls: false, ..environment });
    let why = world.controller.shuffle_demands(1, &["a".into(), "c".into()]).unwrap_err();
    assert!(why.starts_with("the data plane of worker c cannot encrypt"), "{why}");
    // Where the engine carries it, it is encrypted too.
    assert_eq!((world.controller.engine_refuses(2), world.controller.engine_alone_refuses()), (None, None));
}

#[test]
fn the_engine_may_not_carry_what_is_to_be_encrypted_where_it_does_not_encrypt() {
    let mut world = World::new(&["a"]);
    world.task(1, "plain", None);
    assert_eq!(world.controller.engine_alone_refuses(), None);
    let demands = Demands { encrypt: Encryption::Opportunistic, transport: None };
    let spec = JobSpec { demands, ..JobSpec::named("secret".into()) };
    let origin = Origin { client: "client".into(), spec: Some(spec), by: None, span: None };
    let task = NewTask { task: 2, stage: "stage".into(), kind: Kind::Work, inputs: vec![] };
    world.event(Event::Tasks { origin, tasks: vec![task] });
    assert_eq!(world.controller.engine_refuses(1), None);
    let why = world.controller.engine_refuses(2).unwrap();
    assert_eq!(why, "job secret demands encryption, which the engine's own connections lack");
    assert_eq!(world.controller.engine_alone_refuses(), Some(why));
}

#[test]
fn a_shuffle_counts_the_rows_of_its_last_run_and_is_forgotten_with_its_job() {
    let mut world = World::new(&["a", "b"]);
    world.task(1, "etl", None);
    assert_eq!(world.controller.shuffle_demands(1, &["a".into(), "b".into()]), Ok(Demands::default()));
    let why = world.controller.shuffle_demands(1, &["a".into(), "c".into()]).unwrap_err();
    assert_eq!(why, "worker c has no data plane: it has not joined; start it with Mission Control");
    let begins = |engine| {
        let (shuffle, counted, why) = ("s".into(), Counted::Rows, String::new());
        Event::ShuffleBegins { task: 1, shuffle, outputs: 2, counted, engine, why }
    };
    let rows_in = |run, rows| Event::ShuffleIn { shuffle: "s".into(), run, rows, unwanted: 1, cohorts: Vec::new() };
    let rows_out = |run, output, rows| Event::ShuffleOut { shuffle: "s".into(), run, output, rows };
    world.event(rows_in(1, 9));
    world.event(begins(Carrier::Mission));
    for event in [rows_in(1, 9), rows_out(1, 0, 4), begins(Carrier::Mission), rows_in(2, 10), rows_out(1, 1, 5)] {
        world.event(event);
    }
    // Twice the same output, one that there is not, and one of the run before: each row counts once.
    for event in [rows_out(2, 0, 4), rows_out(2, 0, 4), rows_out(2, 2, 1), rows_out(1, 1, 5), rows_out(2, 1, 6)] {
        world.event(event);
    }
    let status = world.controller.status(None);
    let job = status.jobs.iter().find(|job| &*job.status.job == "etl").unwrap();
    let [own] = &job.shuffles[..] else { panic!("{:?}", job.shuffles) };
    assert_eq!((own.runs, own.rows_in, own.rows_unwanted), (2, Some(10), 1));
    assert_eq!((own.rows_out, own.outputs, own.outputs_done), (10, 2, 2));
    world.event(Event::Forgotten { task: 1 });
    world.pass(LAST_WORDS);
    world.event(Event::Tick);
    assert_eq!(world.left(), []);
}

#[test]
fn parts_of_a_shuffle_are_free_once_all_outputs_of_their_cohort_are_done() {
    let mut world = World::new(&["a"]);
    world.task(1, "etl", None);
    let begins = || {
        let (shuffle, counted, engine) = ("s".into(), Counted::Rows, Carrier::Mission);
        Event::ShuffleBegins { task: 1, shuffle, outputs: 6, counted, engine, why: String::new() }
    };
    let inputs = |run| Event::ShuffleIn { shuffle: "s".into(), run, rows: 9, unwanted: 0, cohorts: vec![2, 3, 1] };
    let taken = |world: &mut World, event| -> Vec<(u64, u32)> {
        let is_taken = |command: &Command| match command {
            Command::Taken { run, cohort, .. } => Some((*run, *cohort)),
            _ => None,
        };
        world.event(event).iter().filter_map(is_taken).collect()
    };
    let done = |run, output| Event::ShuffleOut { shuffle: "s".into(), run, output, rows: 1 };
    world.event(begins());
    // These workers were quicker than the one that knows the inputs.
    assert_eq!([5, 0].map(|output| taken(&mut world, done(1, output))), [vec![], vec![]]);
    assert_eq!(taken(&mut world, inputs(1)), [(1, 2)]);
    // Twice the same one, and some of another cohort.
    assert_eq!([0, 2, 3].map(|output| taken(&mut world, done(1, output)).len()), [0, 0, 0]);
    assert_eq!(taken(&mut world, done(1, 1)), [(1, 0)]);
    // Parts were needed once more: they stay.
    world.event(begins());
    assert_eq!(taken(&mut world, inputs(2)), []);
    assert_eq!([0, 1, 2, 3, 4, 5].map(|output| taken(&mut world, done(2, output)).len()), [0; 6]);
    // The program computes the same once more.
    world.event(begins());
    assert_eq!(taken(&mut world, inputs(3)), []);
    assert_eq!([0, 1].map(|output| taken(&mut world, done(3, output))), [vec![], vec![(3, 0)]]);
    // Not for what is done last: the run ends.
    assert_eq!([2, 3, 5].map(|output| taken(&mut world, done(3, output)).len()), [0, 0, 1]);
    assert_eq!(taken(&mut world, done(3, 4)), []);
}

#[test]
fn cohorts_that_make_no_sense_are_passed_over() {
    for cohorts in [vec![1; 9], vec![u32::MAX, 10], vec![2, 3], vec![]] {
        let mut world = World::new(&["a"]);
        world.task(1, "etl", None);
        let (shuffle, counted, engine) = ("s".into(), Counted::Rows, Carrier::Mission);
        world.event(Event::ShuffleBegins { task: 1, shuffle, outputs: 9, counted, engine, why: String::new() });
        world.event(Event::ShuffleIn { shuffle: "s".into(), run: 1, rows: 9, unwanted: 0, cohorts });
        for output in 0..9 {
            let commands = world.event(Event::ShuffleOut { shuffle: "s".into(), run: 1, output, rows: 1 });
            assert_eq!(commands, []);
        }
    }
}

#[test]
fn jobs_share_by_weight_only_while_somebody_has_named_two_of_them() {
    /// The messages about contention that an event causes: to the engine, and to each worker.
    fn contention_after(world: &mut World, event: Event) -> (Vec<bool>, Vec<bool>) {
        world.sent.clear();
        let said = world.event(event);
        let to_engine = said.iter().filter_map(|command| match command {
            Command::Contention { contended } => Some(*contended),
            _ => None,
        });
        let to_workers = world.sent.values().flatten().filter_map(|message| message.contended);
        (to_engine.collect(), to_workers.collect())
    }
    let unnamed = |task: u64, client: &str, span: Option<&str>| {
        let origin = Origin { client: client.into(), spec: None, by: None, span: span.map(Into::into) };
        let new = NewTask { task, stage: "stage".into(), kind: crate::graph::Kind::Work, inputs: vec![] };
        Event::Tasks { origin, tasks: vec![new] }
    };
    let joined = |world: &mut World, worker: &str| {
        let (host, address) = (format!("host of {worker}").into(), format!("{worker}:1").into());
        let said = world.event(Event::Join {
            worker: worker.into(),
            host,
            address,
            environment: crate::flight::Environment { carriers: vec![Transport::Tcp], ..Default::default() },
            problems: vec![],
            protocol: PROTOCOL,
        });
        said.iter().find_map(|command| match command {
            Command::Briefing { contended, .. } => Some(*contended),
            _ => None,
        })
    };
    let mut world = World::new(&["a"]);
    let quiet = (vec![], vec![]);
    for (task, client) in [(1, "one"), (2, "two"), (3, "three")] {
        assert_eq!(contention_after(&mut world, unnamed(task, client, None)), quiet, "nobody has named a job");
    }
    let admit = Event::Admit { spec: JobSpec::named("etl".into()), client: "one".into() };
    assert_eq!(contention_after(&mut world, admit), quiet, "there is one");
    assert_eq!(contention_after(&mut world, unnamed(4, "two", Some("nightly"))), (vec![true], vec![true]));
    let names = [4, 1].map(|task| world.controller.named_job_of(task).map(|job| job.to_string()));
    assert_eq!(names, [Some("nightly".into()), None]);
    assert_eq!(joined(&mut world, "b"), Some(true), "a worker that joins now receives it at once");
    assert_eq!(contention_after(&mut world, Event::Forgotten { task: 4 }), (vec![false], vec![false, false]));
    assert_eq!(joined(&mut world, "c"), Some(false));
    // An operator who gives a job another priority means it.
    let change = Change { priority: Some(2.0), ..Change::default() };
    assert_eq!(contention_after(&mut world, Event::Change { job: "three".into(), change }).0, [true]);
    assert_eq!(contention_after(&mut world, Event::Leave { job: "etl".into(), client: "one".into() }).0, [false]);
}
