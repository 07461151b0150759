package org.missioncontrol;

import com.google.gson.JsonObject;
import java.io.IOException;
import java.lang.ref.Cleaner;
import java.nio.ByteBuffer;
import java.nio.MappedByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.atomic.AtomicLong;

/**
 * Parts of objects that this process reads where they lie. The worker keeps each as it is until no buffer refers to it any
 * more: Java notices that when it collects garbage, and cannot unmap earlier.
 */
final class Mappings {
    private static final Cleaner CLEANER = Cleaner.create();

    private static final long AGAIN_MS = 1000;

    private final Worker worker;
    /** Of this process, and not of a task: what a task has mapped may outlive it. */
    private final String credential;

    /** Mapped bytes: small garbage objects may keep large mappings. */
    private final AtomicLong mapped = new AtomicLong();

    private final BlockingQueue<String> unused = new LinkedBlockingQueue<>();

    Mappings(Worker worker, String credential) {
        this.worker = worker;
        this.credential = credential;
        Thread thread = new Thread(this::giveBack, "mission-mappings");
        thread.setDaemon(true);
        thread.start();
    }

    /** A part, to be read where it lies; a copy of it, where other processes cannot see its memory. */
    ByteBuffer map(String task, Reference reference, int part) throws IOException {
        long length = reference.sizes().get(part);
        if (length > Integer.MAX_VALUE) {
            throw new IOException("part " + part + " of " + reference.object() + " has " + length
                    + " bytes, and a buffer of Java 2 GiB at most: open it, or put smaller parts");
        }
        if (mapped.get() + length > Runtime.getRuntime().maxMemory()) {
            System.gc();
        }
        JsonObject place;
        try (Worker.Taken answer = ask(task, reference, part, true)) {
            if (!answer.has("mission-lease")) {
                return copied(answer, (int) length);
            }
            place = answer.json();
        }
        String lease = place.get("lease").getAsString();
        try (FileChannel file = FileChannel.open(Path.of(place.get("path").getAsString()), StandardOpenOption.READ)) {
            long start = place.get("start").getAsLong();
            MappedByteBuffer buffer = file.map(FileChannel.MapMode.READ_ONLY, start, length);
            mapped.addAndGet(length);
            // Buffers that are made from it refer to it.
            CLEANER.register(buffer, () -> {
                mapped.addAndGet(-length);
                unused.add(lease);
            });
            return buffer;
        } catch (IOException | OutOfMemoryError error) {
            // Another user's memory, for example, or too many mappings: Java reports those as an out-of-memory error.
            unused.add(lease);
        }
        try (Worker.Taken answer = ask(task, reference, part, false)) {
            return copied(answer, (int) length);
        }
    }

    /** No task runs: releases their mappings. */
    void idle() {
        if (mapped.get() > 0) {
            System.gc();
        }
    }

    private Worker.Taken ask(String task, Reference reference, int part, boolean mapped) throws IOException {
        Map<String, Object> asked = Map.of("reference", reference, "part", part, "mapped", mapped);
        byte[] body = Worker.GSON.toJson(asked).getBytes(StandardCharsets.UTF_8);
        return worker.open(task, "POST", "/fetch", ByteBuffer.wrap(body));
    }

    private static ByteBuffer copied(Worker.Taken answer, int length) throws IOException {
        ByteBuffer copy = ByteBuffer.allocateDirect(length);
        byte[] piece = new byte[1 << 16];
        for (int got = answer.read(piece); got >= 0; got = answer.read(piece)) {
            if (got > copy.remaining()) {
                break;
            }
            copy.put(piece, 0, got);
        }
        if (copy.hasRemaining()) {
            throw new IOException("a part's length differs from its reference");
        }
        return copy.flip().asReadOnlyBuffer();
    }

    private void giveBack() {
        List<String> leases = new ArrayList<>();
        while (true) {
            try {
                if (leases.isEmpty()) {
                    leases.add(unused.take());
                } else {
                    // The worker was busy: it is asked again. It ends this process when it closes.
                    Thread.sleep(AGAIN_MS);
                }
                unused.drainTo(leases);
                worker.ask(credential, "POST", "/unmap", Map.of("leases", leases));
                leases.clear();
            } catch (IOException | RuntimeException error) {
                System.err.println("memory was not returned yet: " + error);
            } catch (InterruptedException error) {
                return;
            }
        }
    }
}
