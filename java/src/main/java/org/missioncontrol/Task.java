package org.missioncontrol;

/**
 * A task in Java. The worker makes an instance for each run, by the constructor that takes nothing.
 *
 * <p>Many tasks may run in one process at once: static fields are shared between them.
 */
public interface Task {
    /**
     * Runs the task.
     *
     * @return its result: nothing ({@code null}), a {@link Reference}, a list of references, an {@link Outcome}, or a
     *     value (a text, a number, a list, a map, a record), which a task in Python gets as in JSON. What it returns
     *     is dropped if it has called {@link Context#tailSpawn} or {@link Context#openStream}.
     * @throws Exception the task has failed; its text and its trace are sent to the client that asks for the result
     */
    Object run(Context context) throws Exception;
}
