package org.missioncontrol;

import com.google.gson.JsonElement;
import com.google.gson.JsonNull;
import com.google.gson.JsonObject;
import java.io.IOException;
import java.io.InputStream;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/**
 * A task's connection to its worker. Several threads of the task may use it. After the end of the task its calls fail.
 */
public final class Context {
    private final Worker worker;
    private final Mappings mappings;
    private final String credential;
    private final JsonObject task;
    private boolean delegated;
    private boolean opened;

    Context(Worker worker, Mappings mappings, JsonObject task) {
        this.worker = worker;
        this.mappings = mappings;
        this.task = task;
        credential = task.get("credential").getAsString();
    }

    /** The task's name. */
    public String key() {
        return task.get("key").getAsString();
    }

    /** The task's inputs, in their order. */
    public List<Reference> inputs() {
        return Collections.unmodifiableList(Arrays.asList(Worker.GSON.fromJson(task.get("inputs"), Reference[].class)));
    }

    /** The task's arguments, as a value of this class (a record, a map, a text, ..); {@code null} if there are none. */
    public <T> T arguments(Class<T> type) {
        JsonElement given = task.get("arguments");
        return Worker.GSON.fromJson(given == null ? JsonNull.INSTANCE : given, type);
    }

    /**
     * Opens a part of an object, or of a stream, for reading. The data of a stream comes as it is written.
     *
     * @throws WorkerException if it is lost, or its writer has failed
     */
    public InputStream open(Reference reference, int part) throws IOException {
        Map<String, Object> asked = Map.of("reference", reference, "part", part);
        return open(reference.isStream() ? "/stream/read" : "/fetch", asked);
    }

    /** Opens all parts of an object, one after another. */
    public InputStream open(Reference reference) throws IOException {
        return reference.isStream() ? open(reference, 0) : open("/fetch", Map.of("reference", reference));
    }

    private InputStream open(String path, Map<String, Object> asked) throws IOException {
        byte[] body = Worker.GSON.toJson(asked).getBytes(StandardCharsets.UTF_8);
        return worker.open(credential, "POST", path, ByteBuffer.wrap(body));
    }

    /**
     * A part of an object, of 2 GiB at most, read-only: where it lies, if processes of this host share that memory; else a copy
     * outside of Java's heap. Its memory is freed when no buffer refers to it any more.
     */
    public ByteBuffer map(Reference reference, int part) throws IOException {
        return mappings.map(credential, reference, part);
    }

    /** Reads a part of an object, of 2 GiB at most. */
    public byte[] fetch(Reference reference, int part) throws IOException {
        if (reference.sizes().get(part) > Integer.MAX_VALUE - 8) {
            throw new IOException("part " + part + " of " + reference.object() + " has " + reference.sizes().get(part)
                    + " bytes, and an array of Java 2 GiB at most: open it, or put smaller parts");
        }
        int size = Math.toIntExact(reference.sizes().get(part));
        byte[] content = new byte[size];
        try (InputStream in = open(reference, part)) {
            int got = in.readNBytes(content, 0, size);
            if (got < size || in.read() >= 0) {
                throw new IOException("part " + part + " of " + reference.object() + " has an unexpected length");
            }
        }
        return content;
    }

    /**
     * Makes an object of these parts. It lives as long as a result names it, and until the call to which this task
     * delegates is done where it names it, or a call that was spawned before does.
     */
    public Reference put(byte[]... parts) throws IOException {
        return put(Arrays.stream(parts).map(ByteBuffer::wrap).toArray(ByteBuffer[]::new));
    }

    /** Makes an object of these parts. */
    public Reference put(ByteBuffer... parts) throws IOException {
        ByteBuffer sizes = ByteBuffer.allocate(parts.length * Long.BYTES).order(ByteOrder.LITTLE_ENDIAN);
        ByteBuffer[] body = new ByteBuffer[parts.length + 1];
        body[0] = sizes;
        for (int part = 0; part < parts.length; part++) {
            sizes.putLong(parts[part].remaining());
            body[part + 1] = parts[part];
        }
        sizes.flip();
        JsonObject said = worker.send(credential, "POST", "/put?parts=" + parts.length, body);
        return Worker.GSON.fromJson(said.get("reference"), Reference.class);
    }

    /**
     * Begins a stream. It is at once the result of the task, so those that read it start beside this task; what the task
     * returns is dropped.
     */
    public Stream openStream(int parts) throws IOException {
        worker.ask(credential, "POST", "/stream/open", Map.of("parts", parts));
        opened = true;
        return new Stream();
    }

    /** A stream that the task writes. Its readers get an error if it ends without {@link #close}. */
    public final class Stream {
        /** Adds to a part; waits while its reader is far behind. */
        public void write(int part, byte[] content) throws IOException {
            write(part, ByteBuffer.wrap(content));
        }

        public void write(int part, ByteBuffer content) throws IOException {
            worker.send(credential, "POST", "/stream/write?part=" + part, content);
        }

        /** Ends it: all of it is written. */
        public void close() throws IOException {
            worker.ask(credential, "POST", "/stream/close", Map.of());
        }
    }

    /** Spawns a call as another task. That is kept while another call has it among its inputs, or this task runs. */
    public Spawned spawn(Call call) throws IOException {
        return new Spawned(worker.ask(credential, "POST", "/spawn", call.said).get("future").getAsString());
    }

    /** Delegates this task's result to a call, which runs once this task has returned and its inputs are there. */
    public void tailSpawn(Call call) throws IOException {
        worker.ask(credential, "POST", "/delegate", call.said);
        delegated = true;
    }

    /** Records how many seconds phases of this task took: {@code map_s}, {@code shuffle_s}, {@code reduce_s}. */
    public void notePhases(Map<String, Double> seconds) throws IOException {
        worker.ask(credential, "POST", "/phases", seconds);
    }

    void ended(Object result) throws IOException {
        Map<String, Object> said = new LinkedHashMap<>();
        if (delegated || opened) {
            said.put("value", null);
        } else if (result instanceof Reference) {
            said.put("reference", result);
        } else if (result instanceof Outcome outcome) {
            said.put("value", outcome.value());
            said.put("references", outcome.references());
        } else {
            said.put(isReferences(result) ? "references" : "value", result);
        }
        worker.ask(credential, "POST", "/result", said);
    }

    private static boolean isReferences(Object result) {
        return result instanceof List<?> list
                && !list.isEmpty()
                && list.stream().allMatch(own -> own instanceof Reference);
    }

    void failed(String why) throws IOException {
        worker.ask(credential, "POST", "/error", Map.of("error", why));
    }
}
