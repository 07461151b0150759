package org.missioncontrol;

import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.JsonObject;
import java.io.FilterInputStream;
import java.io.IOException;
import java.io.InputStream;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.Map;
import java.util.concurrent.BlockingDeque;
import java.util.concurrent.LinkedBlockingDeque;

/** The worker beside this process, and the connections to it. */
final class Worker {
    // Null is written, because a result may be null. NaN and infinities, which JSON lacks, are written as Python reads
    // them.
    static final Gson GSON =
            new GsonBuilder().serializeNulls().serializeSpecialFloatingPointValues().create();
    private final String socket;
    /** Each takes a thread of the worker: more than this are not kept. */
    private static final int IDLE_MAX = 16;

    private final BlockingDeque<Connection> idle = new LinkedBlockingDeque<>(IDLE_MAX);

    Worker(String socket) {
        this.socket = socket;
    }

    /** Sends a request in JSON; returns the answer in JSON, or null if it has none. */
    JsonObject ask(String credential, String method, String path, Object body) throws IOException {
        byte[] said = body == null ? new byte[0] : GSON.toJson(body).getBytes(StandardCharsets.UTF_8);
        return send(credential, method, path, ByteBuffer.wrap(said));
    }

    /** Sends bytes; returns the answer in JSON, or null if it has none. */
    JsonObject send(String credential, String method, String path, ByteBuffer... body) throws IOException {
        try (InputStream answer = open(credential, method, path, body)) {
            String text = new String(answer.readAllBytes(), StandardCharsets.UTF_8);
            return text.isEmpty() ? null : GSON.fromJson(text, JsonObject.class);
        }
    }

    /** Sends bytes; returns the body of the answer. */
    Taken open(String credential, String method, String path, ByteBuffer... body) throws IOException {
        Connection connection = idle.pollFirst();
        if (connection == null) {
            connection = new Connection(socket);
        }
        boolean done = false;
        try {
            Connection.Answer answer = connection.request(method, path, credential, body);
            if (answer.status() >= 400) {
                String text = new String(answer.body().readAllBytes(), StandardCharsets.UTF_8);
                done = answer.stays() && idle.offerFirst(connection);
                throw new WorkerException(answer.status(), why(text));
            }
            done = true;
            return new Taken(answer, connection);
        } finally {
            if (!done) {
                connection.close();
            }
        }
    }

    private static String why(String text) {
        try {
            return GSON.fromJson(text, JsonObject.class).get("error").getAsString();
        } catch (RuntimeException other) {
            return text;
        }
    }

    /** A body that returns its connection to the pool at its end. */
    final class Taken extends FilterInputStream {
        private final boolean stays;
        private final boolean chunked;
        private final Map<String, String> headers;
        private Connection connection;

        Taken(Connection.Answer answer, Connection connection) {
            super(answer.body());
            headers = answer.headers();
            stays = answer.stays();
            chunked = answer.isChunked();
            this.connection = connection;
        }

        boolean has(String header) {
            return headers.containsKey(header);
        }

        /** The rest of the body, in JSON. */
        JsonObject json() throws IOException {
            return GSON.fromJson(new String(readAllBytes(), StandardCharsets.UTF_8), JsonObject.class);
        }

        @Override
        public int read() throws IOException {
            return noted(super.read());
        }

        @Override
        public int read(byte[] into, int start, int length) throws IOException {
            return noted(super.read(into, start, length));
        }

        private int noted(int got) {
            if (got < 0 && connection != null && stays && idle.offerFirst(connection)) {
                connection = null;
            }
            return got;
        }

        @Override
        public void close() throws IOException {
            try {
                // The next chunk may take long to arrive.
                if (connection != null && !chunked) {
                    noted(super.read());
                }
            } finally {
                if (connection != null) {
                    // The rest is of no use, and may take long.
                    connection.close();
                    connection = null;
                }
            }
        }
    }
}
