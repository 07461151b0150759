//! The controller of a cluster for an engine's adapter in Python.

use crate::decisions::Flows;
use crate::{bad_input, guarded};
use mission_core::units::Time;
use mission_core::{control, graph};
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// The controller of a cluster. Frequent events have methods of their own, without JSON; they return commands, or
/// `None` if there are none.
#[pyclass(frozen)]
pub struct Controller(Mutex<control::Controller>);

#[pymethods]
impl Controller {
    #[new]
    fn new(policy: &str, flows_per_host: Flows, environment: &str) -> PyResult<Self> {
        let environment = serde_json::from_str(environment).map_err(bad_input)?;
        let controller = control::Controller::new(policy, flows_per_host.get()?, environment).map_err(bad_input)?;
        Ok(Controller(Mutex::new(controller)))
    }

    fn handle(&self, now: f64, event: &str) -> PyResult<Option<String>> {
        self.take(now, serde_json::from_str(event).map_err(bad_input)?)
    }

    #[pyo3(signature = (now, tasks, client, spec=None, by=None, span=None))]
    fn tasks(
        &self,
        now: f64,
        tasks: Vec<(u64, String, String, Vec<u64>)>,
        client: &str,
        spec: Option<&str>,
        by: Option<u64>,
        span: Option<&str>,
    ) -> PyResult<Option<String>> {
        let spec = spec.map(serde_json::from_str).transpose().map_err(bad_input)?;
        let origin = control::Origin { client: client.into(), spec, by, span: span.map(Into::into) };
        let new = |(task, stage, kind, inputs): (u64, String, String, Vec<u64>)| {
            let kind = match &*kind {
                "work" => graph::Kind::Work,
                "select" => graph::Kind::Select,
                "barrier" => graph::Kind::Barrier,
                _ => return Err(bad_input(format!("unknown kind of task {kind:?}: use work, select or barrier"))),
            };
            Ok(control::NewTask { task, stage: stage.into(), kind, inputs })
        };
        let tasks = tasks.into_iter().map(new).collect::<PyResult<Vec<_>>>()?;
        self.take(now, control::Event::Tasks { origin, tasks })
    }

    fn submitted(&self, now: f64, by: u64, tasks: Vec<u64>) -> PyResult<Option<String>> {
        self.take(now, control::Event::Submitted { by, tasks })
    }

    fn begins(&self, now: f64, task: u64, worker: &str) -> PyResult<Option<String>> {
        self.take(now, control::Event::Begins { task, worker: worker.into() })
    }

    fn ends(&self, now: f64, task: u64) -> PyResult<Option<String>> {
        self.take(now, control::Event::Ends { task })
    }

    fn job_of(&self, task: u64) -> PyResult<Option<String>> {
        self.look(|own| own.job_of(task).map(ToString::to_string))
    }

    /// The job of a task, if somebody has named it.
    fn named_job_of(&self, task: u64) -> PyResult<Option<String>> {
        self.look(|own| own.named_job_of(task).map(ToString::to_string))
    }

    /// Jobs that somebody has named, and that are not over.
    #[getter]
    fn named(&self) -> PyResult<usize> {
        self.look(|own| own.named())
    }

    /// Of jobs with queued tasks (`None`: all that nobody has named), the place of the one whose task goes to a worker next.
    fn next(&self, waiting: Vec<Option<String>>) -> PyResult<usize> {
        let waiting: Vec<_> = waiting.into_iter().map(|job| job.map(Into::into)).collect();
        self.look(|own| own.next(&waiting))
    }

    /// Whether a leaving worker still has to wait until others have its objects.
    fn is_handing_over(&self, worker: &str) -> PyResult<bool> {
        self.look(|own| own.is_handing_over(&worker.into()))
    }

    /// Bytes of whole objects that lie with a worker.
    fn object_bytes(&self, worker: &str) -> PyResult<u64> {
        self.look(|own| own.object_bytes(&worker.into()))
    }

    /// Bytes of objects that a task with these inputs would probably have to fetch to a worker.
    fn far_bytes(&self, inputs: Vec<u64>, worker: &str) -> PyResult<u64> {
        self.look(|own| own.far_bytes(&inputs, &worker.into()))
    }

    /// Objects by name, owner, number of parts, bytes, and wanted replicas. Invalid ones are skipped, since any code
    /// can make up a reference.
    fn carries(&self, now: f64, task: u64, objects: Vec<Bound<'_, PyAny>>, alive: bool) -> PyResult<Option<String>> {
        self.take(now, control::Event::Carries { task, objects: carried(&objects), alive })
    }

    /// `needs`: objects as in `carries`.
    fn writes(
        &self,
        now: f64,
        task: u64,
        worker: &str,
        stream: (String, bool),
        needs: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<Option<String>> {
        let ((stream, repeats), needs) = (stream, carried(&needs));
        let stream = stream.parse().map_err(bad_input)?;
        self.take(now, control::Event::Writes { task, worker: worker.into(), stream, repeats, needs })
    }

    fn wrote(&self, now: f64, task: u64, stream: &str) -> PyResult<Option<String>> {
        self.take(now, control::Event::Wrote { task, stream: stream.parse().map_err(bad_input)? })
    }

    #[pyo3(signature = (now, task, worker, run))]
    fn waits(&self, now: f64, task: u64, worker: &str, run: Option<u64>) -> PyResult<Option<String>> {
        self.take(now, control::Event::Continues { task, worker: worker.into(), run })
    }

    /// The engine's run in which the thread of a task waits on this worker.
    fn continues(&self, task: u64, worker: &str) -> PyResult<Option<u64>> {
        self.look(|own| own.continues(task, &worker.into()))
    }

    /// Whether a task writes the same stream each time it runs.
    fn repeats(&self, task: u64) -> PyResult<bool> {
        self.look(|own| own.repeats(task))
    }

    /// For each lost stream of these writers, its replacement: the stream, and the address of its writer's data plane.
    fn written_again(&self, writers: Vec<u64>) -> PyResult<BTreeMap<String, (String, String)>> {
        let each = |own: control::Continued| {
            let place = (own.now.to_string(), own.address.to_string());
            own.before.into_iter().map(move |before| (before.to_string(), place.clone()))
        };
        self.look(|own| own.written_again(&writers).into_iter().flat_map(each).collect())
    }

    /// Workers on which a task writes a stream.
    fn writers(&self) -> PyResult<Vec<String>> {
        self.look(|own| own.writers().iter().map(ToString::to_string).collect())
    }

    /// Whether a task's present result carries an object.
    fn is_carried(&self, task: u64, object: &str) -> PyResult<bool> {
        let object = object.parse().map_err(bad_input)?;
        self.look(|own| own.is_carried(task, object))
    }

    /// `objects`: as in `carries`.
    fn delegates(
        &self,
        now: f64,
        task: u64,
        inputs: Vec<u64>,
        objects: Vec<Bound<'_, PyAny>>,
        alive: bool,
    ) -> PyResult<Option<String>> {
        self.take(now, control::Event::Delegates { task, inputs, objects: carried(&objects), alive })
    }

    fn delegate_ends(&self, now: f64, task: u64, again: bool) -> PyResult<Option<String>> {
        self.take(now, control::Event::DelegateEnds { task, again })
    }

    /// Whether a task whose next step needs a lost object may start again; `None`: no object is lost.
    fn lost_step(&self, task: u64) -> PyResult<Option<bool>> {
        self.look(|own| own.lost_step(task).map(|lost| lost == control::LostStep::BeginAgain))
    }

    /// Whether a task that delegates is at its furthest step so far.
    fn is_furthest(&self, task: u64) -> PyResult<bool> {
        self.look(|own| own.is_furthest(task))
    }

    fn result_gone(&self, now: f64, task: u64, wanted: bool) -> PyResult<Option<String>> {
        self.take(now, control::Event::ResultGone { task, wanted })
    }

    fn forgotten(&self, now: f64, task: u64) -> PyResult<Option<String>> {
        self.take(now, control::Event::Forgotten { task })
    }

    /// Returns the demands (JSON) of an engine's shuffle on the data plane, and `None`; or `None`, and why the engine
    /// has to carry it.
    fn shuffle_demands(&self, task: u64, workers: Vec<String>) -> PyResult<(Option<String>, Option<String>)> {
        let workers: Vec<_> = workers.into_iter().map(Into::into).collect();
        match self.look(|own| own.shuffle_demands(task, &workers))? {
            Ok(demands) => Ok((Some(serde_json::to_string(&demands).map_err(bad_input)?), None)),
            Err(why) => Ok((None, Some(why))),
        }
    }

    /// Why Dask may not carry a shuffle of this task; `None`: it may.
    fn engine_refuses(&self, task: u64) -> PyResult<Option<String>> {
        self.look(|own| own.engine_refuses(task))
    }

    /// Why Dask alone would not meet the demands of some job; `None`: it would.
    fn engine_alone_refuses(&self) -> PyResult<Option<String>> {
        self.look(|own| own.engine_alone_refuses())
    }

    /// The job of a task as it is specified now, as JSON.
    fn spec_of(&self, task: u64) -> PyResult<Option<String>> {
        let spec = self.look(|own| own.spec_of_task(task).map(serde_json::to_string))?;
        spec.transpose().map_err(bad_input)
    }

    #[pyo3(signature = (most=None))]
    fn status(&self, most: Option<usize>) -> PyResult<String> {
        serde_json::to_string(&self.look(|own| own.status(most))?).map_err(bad_input)
    }

    fn held(&self) -> PyResult<BTreeMap<&'static str, usize>> {
        self.look(|own| own.held())
    }

    #[getter]
    fn policy(&self) -> PyResult<String> {
        self.look(|own| own.policy().to_owned())
    }
}

impl Controller {
    fn take(&self, now: f64, event: control::Event) -> PyResult<Option<String>> {
        let commands = self.look(|own| {
            let mut commands = Vec::new();
            own.handle(Time::from_secs_f64(now), event, &mut commands);
            commands
        })?;
        if let Some(control::Command::Invalid { why }) =
            commands.iter().find(|command| matches!(command, control::Command::Invalid { .. }))
        {
            return Err(bad_input(why));
        }
        if commands.is_empty() {
            return Ok(None);
        }
        serde_json::to_string(&commands).map(Some).map_err(bad_input)
    }

    /// Asks the controller. A panic is an error for the caller of this method alone.
    fn look<T>(&self, ask: impl FnOnce(&mut control::Controller) -> T) -> PyResult<T> {
        // A panic under the lock is one failure: the next question is answered from what stands in the books.
        guarded(|| ask(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner)))
    }
}

fn carried(objects: &[Bound<'_, PyAny>]) -> Vec<control::Carried> {
    let read = |object: &Bound<'_, PyAny>| {
        let (name, owner, parts, bytes, copies): (String, String, u32, u64, u32) = object.extract().ok()?;
        Some(control::Carried { object: name.parse().ok()?, owner: owner.into(), parts, bytes, copies })
    };
    objects.iter().filter_map(read).collect()
}
