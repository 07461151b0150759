package org.missioncontrol;

import com.google.gson.JsonObject;
import java.io.IOException;
import java.io.PrintWriter;
import java.io.StringWriter;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;

/** Runs the tasks of one worker, each in a thread. Ends with the worker. */
public final class Host {
    /** Longest trace: the rest is cut off, as it is sent to the client that asks for the result. */
    private static final int TRACE_CHARS = 8192;

    /** For the tasks. */
    private final Worker worker;
    /** To ask for the next task: it has its own connection, whatever the tasks do. */
    private final Worker asked;

    private final ExecutorService threads = Executors.newCachedThreadPool(Host::daemon);
    private final Loaders loaders = new Loaders();
    /** By credential; guarded by itself. */
    private final Map<String, Future<?>> running = new HashMap<>();

    private final Mappings mappings;

    private Host(String socket, String credential) {
        worker = new Worker(socket);
        asked = new Worker(socket);
        mappings = new Mappings(worker, credential);
    }

    public static void main(String[] words) throws IOException {
        StringBuilder first = new StringBuilder();
        for (int next = System.in.read(); next >= 0 && next != '\n'; next = System.in.read()) {
            first.append((char) next);
        }
        String credential = first.toString();
        daemon(() -> new Host(System.getenv("MISSION_CONTROL_SOCKET"), credential).take(credential)).start();
        // The worker holds the other end, and is gone when that is.
        while (System.in.read() >= 0) {}
        Runtime.getRuntime().halt(0);
    }

    private static Thread daemon(Runnable what) {
        Thread thread = new Thread(what);
        thread.setDaemon(true);
        return thread;
    }

    private void take(String credential) {
        try {
            while (true) {
                JsonObject next = asked.ask(credential, "POST", "/next", null);
                if (next != null && next.has("cancelled")) {
                    synchronized (running) {
                        Future<?> task = running.get(next.get("cancelled").getAsString());
                        if (task != null) {
                            task.cancel(true);
                        }
                    }
                } else if (next != null) {
                    String name = next.get("credential").getAsString();
                    // Before the task runs, so that it finds its entry when it ends.
                    synchronized (running) {
                        running.put(name, threads.submit(() -> run(name, next)));
                    }
                }
            }
        } catch (Throwable error) {
            end(70, "this process accepts no more tasks: " + error);
        }
    }

    /** Ends this process; its tasks run again elsewhere. */
    private static void end(int status, String why) {
        System.err.println(why);
        Runtime.getRuntime().halt(status);
    }

    private void run(String name, JsonObject task) {
        Context context = new Context(worker, mappings, task);
        List<String> jars = List.of(Worker.GSON.fromJson(task.get("jars"), String[].class));
        try {
            try {
                ClassLoader loader = loaders.take(jars);
                Thread.currentThread().setContextClassLoader(loader);
                Class<?> found = Class.forName(task.get("class").getAsString(), true, loader);
                Object made = found.getDeclaredConstructor().newInstance();
                if (!(made instanceof Task own)) {
                    throw new IllegalArgumentException(found.getName() + " does not implement org.missioncontrol.Task");
                }
                Object result = own.run(context);
                // An interrupted thread cannot send anything.
                Thread.interrupted();
                context.ended(result);
            } catch (OutOfMemoryError | InternalError error) {
                // The state of this process is unreliable for all other tasks.
                end(71, "this process ends: " + error);
            } catch (Throwable error) {
                Thread.interrupted();
                context.failed(textOf(error));
            }
        } catch (WorkerException over) {
            if (over.status != 401 && over.status != 410) {
                end(72, context.key() + " could not report how it ended: " + over);
            }
        } catch (Throwable error) {
            // Its worker would wait for ever.
            end(72, context.key() + " could not report how it ended: " + error);
        } finally {
            Thread.interrupted();
            Thread.currentThread().setContextClassLoader(Host.class.getClassLoader());
            loaders.giveBack(jars);
            boolean idle;
            synchronized (running) {
                running.remove(name);
                idle = running.isEmpty();
            }
            if (idle) {
                mappings.idle();
            }
        }
    }

    private static String textOf(Throwable error) {
        StringWriter text = new StringWriter();
        try {
            error.printStackTrace(new PrintWriter(text));
        } catch (RuntimeException other) {
            text.append(error.getClass().getName());
        }
        String trace = text.toString().strip();
        return trace.length() <= TRACE_CHARS ? trace : trace.substring(0, TRACE_CHARS) + " ..";
    }
}
