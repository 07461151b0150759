package org.missioncontrol;

import com.google.gson.JsonObject;
import java.io.IOException;
import java.io.PrintWriter;
import java.io.StringWriter;
import java.io.UncheckedIOException;
import java.net.MalformedURLException;
import java.net.URL;
import java.net.URLClassLoader;
import java.nio.file.Path;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;

/** Runs the tasks of one worker, each in a thread. Ends with the worker. */
public final class Host {
    /** Of a trace, the end is cut off: it goes to whoever asks for the result. */
    private static final int TRACE_CHARS = 8192;

    private final Worker worker;
    private final ExecutorService threads = Executors.newCachedThreadPool(Host::daemon);
    private final Map<List<String>, ClassLoader> loaders = new ConcurrentHashMap<>();
    private final Map<String, Future<?>> running = new ConcurrentHashMap<>();

    private Host(Worker worker) {
        this.worker = worker;
    }

    public static void main(String[] words) throws IOException {
        String credential = System.getenv("MISSION_CONTROL_CREDENTIAL");
        Thread taker = daemon(() -> new Host(new Worker(System.getenv("MISSION_CONTROL_SOCKET"))).take(credential));
        taker.start();
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
                JsonObject next = worker.ask(credential, "POST", "/next", null);
                if (next != null && next.has("cancelled")) {
                    Future<?> task = running.get(next.get("cancelled").getAsString());
                    if (task != null) {
                        task.cancel(true);
                    }
                } else if (next != null) {
                    String name = next.get("credential").getAsString();
                    // Before it runs, so that it finds itself there when it ends.
                    synchronized (running) {
                        running.put(name, threads.submit(() -> run(name, next)));
                    }
                }
            }
        } catch (IOException | RuntimeException error) {
            System.err.println("this process takes no more tasks: " + error);
            Runtime.getRuntime().halt(70);
        }
    }

    private void run(String name, JsonObject task) {
        Context context = new Context(worker, task);
        try {
            try {
                ClassLoader loader = loaderOf(List.of(Worker.GSON.fromJson(task.get("jars"), String[].class)));
                Thread.currentThread().setContextClassLoader(loader);
                Class<?> found = Class.forName(task.get("class").getAsString(), true, loader);
                Object made = found.getDeclaredConstructor().newInstance();
                if (!(made instanceof Task own)) {
                    throw new IllegalArgumentException(found.getName() + " does not implement org.missioncontrol.Task");
                }
                context.ended(own.run(context));
            } catch (OutOfMemoryError | InternalError error) {
                // No other task here can rely on anything any more.
                System.err.println("this process ends: " + error);
                Runtime.getRuntime().halt(71);
            } catch (Throwable error) {
                context.failed(textOf(error));
            }
        } catch (IOException over) {
            // Nobody waits for it.
            System.err.println(context.key() + ": " + over.getMessage());
        } finally {
            Thread.interrupted();
            Thread.currentThread().setContextClassLoader(Host.class.getClassLoader());
            synchronized (running) {
                running.remove(name);
            }
        }
    }

    private ClassLoader loaderOf(List<String> jars) {
        return loaders.computeIfAbsent(jars, paths -> {
            URL[] urls = paths.stream().map(Host::urlOf).toArray(URL[]::new);
            return new URLClassLoader(urls, Host.class.getClassLoader());
        });
    }

    private static URL urlOf(String path) {
        try {
            return Path.of(path).toUri().toURL();
        } catch (MalformedURLException error) {
            throw new UncheckedIOException(error);
        }
    }

    private static String textOf(Throwable error) {
        StringWriter text = new StringWriter();
        error.printStackTrace(new PrintWriter(text));
        String trace = text.toString().strip();
        return trace.length() <= TRACE_CHARS ? trace : trace.substring(0, TRACE_CHARS) + " ..";
    }
}
