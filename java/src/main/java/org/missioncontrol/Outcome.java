package org.missioncontrol;

import java.util.List;

/**
 * A result of a value and references; a task in Python gets both as a tuple.
 *
 * @param value as in JSON
 * @param references of objects that live as long as the result does
 */
public record Outcome(Object value, List<Reference> references) {}
