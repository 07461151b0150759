package org.missioncontrol;

import java.io.IOException;
import java.io.UncheckedIOException;
import java.net.MalformedURLException;
import java.net.URL;
import java.net.URLClassLoader;
import java.nio.file.Path;
import java.util.Iterator;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** The classes of jars. Those that no task has used for the longest time are dropped. */
final class Loaders {
    /** Most sets of jars whose classes stay although no task runs with them. */
    private static final int IDLE_MAX = 16;

    /** By the jars' files, the one that was used last at the end; guarded by this. */
    private final Map<List<String>, Loader> loaders = new LinkedHashMap<>(16, 0.75f, true);

    private static final class Loader {
        private final URLClassLoader classes;
        /** Tasks that run with them. */
        private int users;

        private Loader(List<String> jars) {
            URL[] urls = jars.stream().map(Loaders::urlOf).toArray(URL[]::new);
            classes = new URLClassLoader(urls, Loaders.class.getClassLoader());
        }
    }

    /** Returns the classes of jars for a task, which gives them back when it ends. */
    synchronized ClassLoader take(List<String> jars) {
        Loader loader = loaders.computeIfAbsent(jars, Loader::new);
        loader.users++;
        return loader.classes;
    }

    /** Ends the use by a task; nothing happens if its jars could not be taken. */
    synchronized void giveBack(List<String> jars) {
        Loader own = loaders.get(jars);
        if (own == null) {
            return;
        }
        own.users--;
        long idle = loaders.values().stream().filter(loader -> loader.users == 0).count();
        for (Iterator<Loader> next = loaders.values().iterator(); next.hasNext() && idle > IDLE_MAX; ) {
            Loader loader = next.next();
            if (loader.users == 0) {
                next.remove();
                idle--;
                try {
                    loader.classes.close();
                } catch (IOException error) {
                    System.err.println("the jars of classes that are no longer used were not closed: " + error);
                }
            }
        }
    }

    private static URL urlOf(String path) {
        try {
            return Path.of(path).toUri().toURL();
        } catch (MalformedURLException error) {
            throw new UncheckedIOException(error);
        }
    }
}
