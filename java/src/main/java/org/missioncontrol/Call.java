package org.missioncontrol;

import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** What is to run as another task ({@link Context#spawn}), or in place of this one ({@link Context#tailSpawn}). */
public final class Call {
    final Map<String, Object> said = new LinkedHashMap<>();
    private final List<Object> inputs = new ArrayList<>();

    private Call(String kind, Object what) {
        said.put(kind, what);
        said.put("inputs", inputs);
    }

    /** A task in Java, from the same jars. */
    public static Call java(Class<? extends Task> task) {
        return new Call("java", task.getName());
    }

    /** A function in Python, as in {@code "package.module:function"}; it is called with the inputs and the arguments. */
    public static Call python(String function) {
        return new Call("python", function);
    }

    /**
     * Any program; its result is an object of its outputs.
     *
     * @param command texts, {@link #in} and {@link #out}
     */
    public static Call program(Object... command) {
        return new Call("program", List.of(command));
    }

    /** In a program's command: the path of an input, by its number. */
    public static Object in(int number) {
        return Map.of("in", number);
    }

    /** In a program's command: the path at which it leaves an output, by its number. */
    public static Object out(int number) {
        return Map.of("out", number);
    }

    public Call input(Reference reference) {
        inputs.add(reference);
        return this;
    }

    /** An input that is the result of another task: the call waits for it. */
    public Call input(Spawned spawned) {
        inputs.add(spawned);
        return this;
    }

    public Call inputs(Iterable<?> more) {
        for (Object input : more) {
            if (!(input instanceof Reference) && !(input instanceof Spawned)) {
                throw new IllegalArgumentException("an input is a Reference, or Spawned, and not " + input);
            }
            inputs.add(input);
        }
        return this;
    }

    /** The arguments, as JSON: any value for a task in Java, a list for a function in Python. */
    public Call arguments(Object arguments) {
        said.put("arguments", arguments);
        return this;
    }

    /** How many outputs a program has. */
    public Call outputs(int outputs) {
        said.put("outputs", outputs);
        return this;
    }
}
